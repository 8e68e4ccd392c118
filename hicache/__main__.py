"""`python -m hicache`: the same as the `hicache` command."""

from hicache.cli.main import main

if __name__ == "__main__":
    main(prog_name="hicache")
