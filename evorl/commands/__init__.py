"""The command line: `command.py` declares every command, and the other modules run them."""
