import torch

from effasr.decoding.continuous_batching.cuda_graph import Readback, StepGraph


def test_a_step_is_recorded_once_and_replayed() -> None:
    state, recorded = torch.zeros(3), []

    def step() -> torch.Tensor:
        return state.add_(1) * 10

    def capture(run):
        recorded.append(run)
        output = torch.empty(3)
        return lambda: output.copy_(run()), output

    graph = StepGraph(step, capture)
    assert graph().tolist() == [10.0] * 3
    assert graph().tolist() == [20.0] * 3
    assert recorded == [step]
    assert state.tolist() == [2.0] * 3


def test_results_come_in_order_and_some_steps_later() -> None:
    output = torch.zeros(2, dtype=torch.int64)
    readback = Readback(2, ahead=2, device=torch.device("cpu"))
    seen = []
    for number in range(5):
        readback.put(output.fill_(number), f"step {number}")
        if readback.due:
            seen.append(readback.get())
    assert seen == [([n, n], f"step {n}") for n in range(3)]
    assert len(readback) == 2
    assert [readback.get()[0] for _ in range(2)] == [[3, 3], [4, 4]]
    assert not readback.due
