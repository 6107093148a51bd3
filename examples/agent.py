"""An agent that knows nothing of training: it asks OpenAI's API for a sum, and asks once more if the sum was wrong.

`examples/agent.toml` names it. A run starts it once per episode, with OPENAI_BASE_URL and OPENAI_API_KEY for the
client, and the number of the problem in ROUTER_REPLAY_PROBLEM. The last line that it prints is the reward. The messages
are written for the tiny model of this package, which knows additions only and has no roles.
"""

from __future__ import annotations

import os
import random

from openai import OpenAI


def main() -> None:
    numbers = random.Random(int(os.environ["ROUTER_REPLAY_PROBLEM"]))  # the same problem asks the same
    first, second = numbers.randrange(10, 100), numbers.randrange(10, 100)
    client = OpenAI(timeout=3600)
    messages = [{"role": "user", "content": f"{first}+{second}="}]
    reward = 0.0
    for worth in (1.0, 0.5):
        reply = client.chat.completions.create(model="policy", messages=messages)
        answer = reply.choices[0].message.content or ""
        if answer.strip() == str(first + second):
            reward = worth
            break
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"{first}+{second}="}]
    print(reward)  # noqa: T201


if __name__ == "__main__":
    main()
