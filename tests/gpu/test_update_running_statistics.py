import pytest
import torch

from effasr_kernels import PackedLayout, update_running_statistics
from effasr_kernels.update_running_statistics import updates_together


@pytest.mark.parametrize("channels", [3, 300])
@pytest.mark.parametrize(
    "sizes", [(4, 0, 7), (1,), (0, 0)], ids=["empty_among_others", "one_row", "no_row"]
)
def test_running_statistics_are_those_of_the_reference(
    sizes: tuple[int, ...], channels: int, device: torch.device
) -> None:
    given = [torch.randn(channels), torch.rand(channels), torch.tensor(3)]
    found = torch.randn(channels), torch.rand(channels)
    outcomes = []
    for backend, place in (("reference", torch.device("cpu")), ("triton", device)):
        state = [x.clone().to(place) for x in given]
        layout = PackedLayout.from_lengths(sizes, place, rows=sum(sizes) + 2)
        batch = [x.to(place) for x in found]
        update_running_statistics(*state, *batch, layout, momentum=0.3, backend=backend)
        outcomes.append([x.cpu() for x in state])
    for actual, expected in zip(*outcomes[::-1], strict=True):
        torch.testing.assert_close(actual, expected, rtol=4e-7, atol=4e-7)


def test_one_launch_for_several_layers_changes_no_bit(device: torch.device) -> None:
    layout = PackedLayout.from_lengths((4, 7), device, rows=13)
    layers = [
        [
            torch.randn(300, device=device),
            torch.rand(300, device=device),
            torch.tensor(n).to(device),
        ]
        for n in range(3)
    ]
    found = [(torch.randn(300, device=device), torch.rand(300, device=device)) for _ in layers]

    def updated() -> list[torch.Tensor]:
        copies = [[x.clone() for x in layer] for layer in layers]
        for layer, batch in zip(copies, found, strict=True):
            update_running_statistics(*layer, *batch, layout, backend="triton")
        return [x for layer in copies for x in layer]

    apart = updated()
    with updates_together():
        together = updated()
    assert all(map(torch.equal, together, apart))
    assert [int(together[3 * n + 2]) for n in range(3)] == [1, 2, 3]
    assert not torch.equal(together[0], layers[0][0])
