"""The kinds of tasks, by the fields of their items. Register here and nowhere else."""

from tokenmill.registry import Registry

TASKS = Registry(
    "kind of task",
    {
        "lambada": "tokenmill.evaluate.tasks.lambada:Lambada",
        "multiple_choice": "tokenmill.evaluate.tasks.multiple_choice:MultipleChoice",
        "hellaswag": "tokenmill.evaluate.tasks.hellaswag:HellaSwag",
        "mmlu": "tokenmill.evaluate.tasks.mmlu:Mmlu",
        "truthfulqa": "tokenmill.evaluate.tasks.truthfulqa:TruthfulQA",
        "gsm8k": "tokenmill.evaluate.tasks.gsm8k:Gsm8k",
        "ifeval": "tokenmill.evaluate.tasks.ifeval:IfEval",
        "humaneval": "tokenmill.evaluate.tasks.humaneval:HumanEval",
    },
)
