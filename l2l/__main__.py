"""`python -m l2l` is the command line."""

from l2l.cli import command

if __name__ == "__main__":
    command()
