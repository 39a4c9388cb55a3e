"""``python -m slipstream.cli``: the same as the console script."""

from slipstream.cli.main import main

if __name__ == "__main__":
    main()
