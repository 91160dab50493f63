"""A machine whose memory and speed are known, in the place of the processes of trials."""

from effasr import config as configuration
from effasr.training.calibration import calibrate
from effasr.training.calibration.search import MemoryModel, load_of
from effasr.training.calibration.trial import Measurement
from effasr.training.config import TrainConfig


def known_machine(monkeypatch, memory: MemoryModel) -> list:
    """The requests of trials, as they come."""
    requests = []

    def measure(request, *, alive):
        requests.append(request)
        alive()
        config = configuration.from_mapping(TrainConfig, request.config)
        peak = memory.predict(load_of(request.workload, config.model))
        if peak > request.limit_bytes:
            return Measurement(fits=False, reason="out of memory")
        frames = request.workload.shape.frame_budget
        return Measurement(True, peak, peak, 1e-3 + 1e-4 * frames, 0.08 * frames)

    monkeypatch.setattr(calibrate, "measure", measure)
    return requests
