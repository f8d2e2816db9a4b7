"""Ways into other trainers, a file each. A file imports its tool only where it is used."""
