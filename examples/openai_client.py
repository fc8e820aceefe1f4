"""The OpenAI client against `tokenmill serve`: starts a server on a free port, streams an answer, stops the server.

pip install openai
python examples/openai_client.py [MODEL]
"""

import json
import subprocess
import sys

from openai import OpenAI

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"

# With --json the server prints one object on stdout as soon as it takes requests.
command = [sys.executable, "-m", "tokenmill", "serve", MODEL, "--port", "0", "--json"]
server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
try:
    address = json.loads(server.stdout.readline())["url"]
    client = OpenAI(base_url=f"{address}/v1", api_key="not-needed")
    name = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": "Why is the sky blue? One sentence."}],
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:
            print(f"\n{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out")
finally:
    server.terminate()
    server.wait()
