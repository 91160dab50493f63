import pytest
import torch

from effasr_kernels import PackedLayout, update_running_statistics


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
