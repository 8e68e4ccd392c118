"""Follow the KV events of an engine and print what its cache holds. A router learns it in the same way.

    python examples/follow_events.py tcp://127.0.0.1:5557 tcp://127.0.0.1:5558

The two addresses are `events.endpoint` and `events.replay_endpoint` of the engine's configuration. The program fetches
missed messages from the second address, also messages from before its start. It needs the extra `events`.
"""

from __future__ import annotations

import argparse
import time

from hicache.errors import HiCacheError
from hicache.events import Medium, PrefixIndex
from hicache.events.subscriber import EventFollower
from hicache.keys import RadixKey, page_keys

POLL_S = 0.1


def describe(index: PrefixIndex) -> str:
    """Return one line with the number of pages on each tier."""
    if not index.in_sync:
        return "out of sync: waiting for a snapshot"
    pages = index.pages()
    return f"{pages[Medium.DEVICE]} pages on the device, {pages[Medium.HOST]} on the host, " \
           f"{pages[Medium.STORAGE]} of them in storage"


def cached_tokens(index: PrefixIndex, prompt: list[int], page_size: int, tenant: str | None) -> int:
    """Return how many tokens of a prompt the engine has on its device. A router compares this between engines."""
    key = RadixKey.of(prompt, cache_salt=tenant)
    return page_size * index.prefix_pages(page_keys(key.tokens, page_size, key.seed), Medium.DEVICE)


def main() -> None:
    """Print a line after each change."""
    parser = argparse.ArgumentParser(description="Follow the KV events of an engine.")
    parser.add_argument("endpoint", help="address at which the engine publishes events")
    parser.add_argument("replay_endpoint", help="address from which missed events are fetched")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="how long to follow (default: no limit)")
    parser.add_argument("--prompt", type=int, nargs="+", help="also show how many tokens of this prompt are cached")
    parser.add_argument("--page-size", type=int, default=64, help="tokens per page of the engine")
    parser.add_argument("--tenant", help="the prompt's cache_salt")
    args = parser.parse_args()
    end_s = time.monotonic() + args.seconds
    with EventFollower(args.endpoint, args.replay_endpoint) as follower:
        shown = ""
        while time.monotonic() < end_s:
            follower.poll(POLL_S)
            line = describe(follower.index)
            if args.prompt:
                tokens = cached_tokens(follower.index, args.prompt, args.page_size, args.tenant)
                line += f"; {tokens} tokens of the prompt on the device"
            if line != shown:
                print(line, flush=True)
                shown = line
        follower.index.check()


if __name__ == "__main__":
    try:
        main()
    except HiCacheError as error:
        raise SystemExit(str(error)) from error
    except KeyboardInterrupt:
        pass  # the user ends the program in this way
