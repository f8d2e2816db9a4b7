"""Integrations with other trainers, one file per tool. Each file imports its tool only when it is used."""
