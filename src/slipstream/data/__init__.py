"""Prompts and supervised rows, and an endless sampler over them with a resumable cursor.

Owns: reading and checking data.  Refuses: training.  Imports without torch.
"""

from slipstream.data.prompts import LoadReport, PromptDataset, PromptRow
from slipstream.data.sampler import Sampler
from slipstream.data.sft import SftDataset, SftRow, alpaca_messages, chat_trajectory
from slipstream.data.sources import read_source, register_builtin

__all__ = [
    "LoadReport",
    "PromptDataset",
    "PromptRow",
    "Sampler",
    "SftDataset",
    "SftRow",
    "alpaca_messages",
    "chat_trajectory",
    "read_source",
    "register_builtin",
]
