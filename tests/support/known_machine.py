"""A machine whose memory and speed are known, in the place of the processes of trials."""

from effasr.training.calibration import calibrate
from effasr.training.calibration.calibrate import LinearModel
from effasr.training.calibration.trial import Measurement


def known_machine(monkeypatch, memory: LinearModel) -> list:
    """The requests of trials, as they come."""
    requests = []

    def measure(request, *, alive):
        requests.append(request)
        alive()
        frames = request.workload.shape.frame_budget
        peak = round(memory.predict(frames))
        if peak > request.limit_bytes:
            return Measurement(fits=False, reason="out of memory")
        return Measurement(True, peak, 1e-3 + 1e-4 * frames, 0.08 * frames)

    monkeypatch.setattr(calibrate, "measure", measure)
    return requests
