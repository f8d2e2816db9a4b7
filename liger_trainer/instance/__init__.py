"""What is done to single instances of modules: methods bound to them, hooks seen on them, and the report."""
