"""One process of a run in test_gossip_training.py: it notes what it trains on.

Arguments: the recipe, a folder for notes, and what is to happen to this process, as JSON:
``pause_s`` after each step; and after how many of its own steps ``kill_at`` kills it, ``stop_at``
asks it to stop, ``freeze_at`` lets it fall silent, and ``nan_at`` gives it sound that is no number.
``late_at``: after which meeting it goes on so late that the others have done all by then.
``strangers``: so many foreign programs connect to it before its neighbours.
"""

import itertools
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch

from effasr import config as configuration
from effasr.distributed.async_sgd.gossip.sockets import Listener
from effasr.distributed.async_sgd.weight_averaging import WeightAveraging
from effasr.training import trainer
from effasr.training.config import TrainConfig
from effasr.training.step import train_step


def main(recipe: str, notes: str, fate: str) -> int:
    events = json.loads(fate)
    made = 0
    path = Path(notes) / f"{os.environ['RANK']}.jsonl"

    def noted(train_state, batches, step, **options):
        nonlocal made
        if made == events.get("kill_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if made == events.get("freeze_at"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if made == events.get("nan_at"):
            batches[0].audio.values.fill_(torch.nan)
        report = train_step(train_state, batches, step, **options)
        made += 1
        ids = [name for batch in batches for name in batch.ids]
        with path.open("a") as file:
            file.write(json.dumps({"step": step, "ids": ids, "lr": report.lr}) + "\n")
        time.sleep(events.get("pause_s", 0.0))
        if made == events.get("stop_at"):
            os.kill(os.getpid(), signal.SIGTERM)
        return report

    begin, meetings = WeightAveraging.start, itertools.count()

    def late(self):
        begin(self)
        if next(meetings) == events.get("late_at"):
            time.sleep(3.0)

    accept = Listener.accept

    def attacked(self, peers, until):
        clients = [
            socket.create_connection(self.endpoints[0]) for _ in range(events.get("strangers", 0))
        ]
        for client in clients:
            client.sendall(bytes(1000))
        result = accept(self, peers, until)
        for client in clients:
            client.close()
        return result

    Listener.accept = attacked
    WeightAveraging.start = late
    trainer.train_step = noted
    return trainer.run(configuration.load(TrainConfig, Path(recipe), []))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(*sys.argv[1:]))
