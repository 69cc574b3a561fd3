"""`rocline` where the release has the demo's sizes: python small_release.py -m rocline.tools.cli WORDS..."""

import sys

from rocline.tools import cli, synthetic_model
from rocline.tools.demo_checkpoint import demo_config

if __name__ == "__main__":
    synthetic_model.RELEASE_CONFIG = demo_config()
    sys.exit(cli.main(sys.argv[3:]))
