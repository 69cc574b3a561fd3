"""`rocline serve` over a fake engine, as a process: fake_server.py MODEL [--step-s S] [serve's flags]."""

import argparse
import os
import sys
import threading


def main() -> int:
    # Here, not above: the server's workers import this file, and torch would take them seconds and 200 MB each.
    from fake_engine import Counting, FakeEngine

    from rocline.engine.config import ModelConfig
    from rocline.http.settings import Settings
    from rocline.pipeline.options import Options
    from rocline.tools import serve

    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--fail-after-s", type=float)
    args, flags = parser.parse_known_args()
    words = dict(zip(flags[::2], flags[1::2], strict=True))
    named = {"model": args.model} | {flag[2:].replace("-", "_"): value for flag, value in words.items()}
    values = serve.configuration(named, os.environ, None)
    settings, options = serve.build(values, Settings), serve.build(values, Options)

    def open_engine() -> FakeEngine:
        config = ModelConfig.load(args.model)
        engine = FakeEngine(config, options, answer=lambda r: Counting(r.params.max_tokens), step_s=args.step_s)
        if args.fail_after_s is not None:
            threading.Timer(args.fail_after_s, engine.break_down, ["stage 3 hangs"]).start()
        return engine

    return serve.serve(args.model, settings, options, serve.api_keys(settings, os.environ), open_engine)


if __name__ == "__main__":
    sys.exit(main())
