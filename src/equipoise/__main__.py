"""``python -m equipoise`` is ``equipoise``."""

from .cli.main import main

if __name__ == "__main__":
    main()
