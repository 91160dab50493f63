import torch

from effasr_kernels import PackedLayout, audio_windows

samples = PackedLayout.from_lengths([800, 480])
slots = PackedLayout.from_lengths([5, 3])
audio, window = torch.randn(1280), torch.hann_window(64)

windows = audio_windows(audio, window, samples, slots, rows_per_slot=1, hop=160, n_fft=64)
first = torch.stft(audio[:800], 64, 160, window=window, pad_mode="constant", return_complex=True)
torch.testing.assert_close(torch.fft.rfft(windows[:5]), first.T[:5])
