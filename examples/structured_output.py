"""Structured output: JSON that follows a schema, and one of several fixed answers.

python examples/structured_output.py [MODEL]        (a model that has seen some JSON)
"""

import json
import sys

from tokenmill import LLM, SamplingParams, StructuredSpec

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}

with LLM(MODEL, context=256) as llm:
    person = SamplingParams(temperature=0, max_tokens=60, structured=StructuredSpec("json_schema", json.dumps(SCHEMA)))
    mood = SamplingParams(temperature=0, max_tokens=8, structured=StructuredSpec("choice", choices=("happy", "sad")))
    outputs = llm.generate(["A person as JSON:", "Tim got a new puppy. Tim was"], [person, mood])
    found = json.loads(outputs[0].outputs[0].text)
    print(f"name {found['name']!r}, age {found['age']}")
    print(f"Tim was {outputs[1].outputs[0].text}")
