"""The commands other than train: fit, verify, compare, chat, merge, doctor, medusa-eval and medusa-export."""
