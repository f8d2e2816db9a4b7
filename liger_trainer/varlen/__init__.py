"""Rows of uneven length without their padding: attention that reads lengths, and the backbone run on real tokens."""
