"""A small agent: it asks the model, runs the calls of its tool `bash`, and ends when a reply has none.

    python3 fake_agent.py TASK

If the task names a fault, such as `fault=exit`, the agent has it. Faults of the model's tool are in the model's script.
"""

import http.client
import json
import os
import subprocess
import sys
import time

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}


def ask(messages: list[dict]) -> dict:
    host = os.environ["OPENAI_BASE_URL"].split("/")[2]
    connection = http.client.HTTPConnection(host, timeout=60)
    body = json.dumps({"model": os.environ["MODEL"], "messages": messages, "tools": [TOOL]})
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    answer = connection.getresponse()
    if answer.status != 200:
        sys.exit(f"status {answer.status}: {answer.read().decode()}")
    return json.load(answer)["choices"][0]["message"]


def main(task: str) -> None:
    fault = task.partition("fault=")[2].split(".")[0]
    if fault == "silent":
        return
    if fault in ("crash", "status"):  # 128 + 32 is not a signal
        sys.exit(3 if fault == "crash" else 160)
    messages = [{"role": "user", "content": task}]
    while True:
        reply = ask(messages)
        messages.append(reply)
        calls = reply.get("tool_calls") or []
        for call in calls:
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout.decode()[:200]})
        if not calls:
            break
    misbehave(fault)


def misbehave(fault: str) -> None:
    """Have a fault after the conversation."""
    if fault == "flood":
        while True:
            sys.stdout.write("x" * 65536)
    if fault == "hang":
        subprocess.Popen(["setsid", "sleep", "4000"])
        time.sleep(4000)
    if fault == "killed":
        os.kill(os.getpid(), 9)
    if fault == "leftover":  # a process that would change the result after the end of the agent
        subprocess.Popen(["setsid", "bash", "-c", "while :; do echo wrong > answer.txt; done"])


main(sys.argv[1])
