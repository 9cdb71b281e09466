"""`python -m simpar.cli`: the command line."""

from simpar.cli import main

if __name__ == "__main__":
    main()
