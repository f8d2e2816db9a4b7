"""The commands other than train: fit, verify, compare, chat, merge, doctor, evaluate, and the commands for heads."""
