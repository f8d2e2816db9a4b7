"""What is shown about a model before it trains: that rows without padding compute what the padded batch does."""
