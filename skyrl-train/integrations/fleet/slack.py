"""Messages to Slack, from runs and from workflows. Needs only the standard library.

    SLACK_BOT_TOKEN=… python skyrl-train/integrations/fleet/slack.py "Training started"

prints the message's timestamp. Pass it to `--thread` in a later call to reply in the thread.
"""

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

DEFAULT_CHANNEL = "#fleet-training-runs"
DEFAULT_URL = "https://slack.com/api/chat.postMessage"
TIMEOUT_S = 10.0


class SlackError(RuntimeError):
    """Slack did not accept a message. The text never contains the token."""


def post(text: str, thread: str | None = None) -> str | None:
    """Post a message to `$SLACK_CHANNEL`. Return its timestamp, or None without SLACK_BOT_TOKEN.

    Raises:
        SlackError: Slack cannot be reached, or rejects the message.
    """
    token = os.environ.get("SLACK_BOT_TOKEN")
    if not token:
        return None
    body = {"channel": os.environ.get("SLACK_CHANNEL") or DEFAULT_CHANNEL, "text": text}
    body |= {"thread_ts": thread} if thread else {}
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json; charset=utf-8"}
    url = os.environ.get("SLACK_API_URL") or DEFAULT_URL
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            answer = json.load(response)
    except (urllib.error.URLError, TimeoutError, ValueError) as error:
        raise SlackError(f"Slack cannot be reached: {error}; check the network of this machine") from error
    if not answer.get("ok"):
        raise SlackError(
            f"Slack refused a message to {body['channel']}: {answer.get('error')}; check SLACK_BOT_TOKEN, and invite "
            "the bot to the channel"
        )
    return str(answer.get("ts"))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. If the message is not accepted, only warn: it must not end a workflow."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("text", help="the message")
    parser.add_argument("--thread", help="timestamp of the message to answer to")
    args = parser.parse_args(argv)
    try:
        print(post(args.text, args.thread) or "")
    except SlackError as error:
        print(f"warning: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
