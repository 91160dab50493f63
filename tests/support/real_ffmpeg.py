"""Finds ffmpeg: the one that is installed, or that of the package imageio-ffmpeg."""

import shutil


def real_ffmpeg() -> str | None:
    """Return the path of the program, or None where there is neither."""
    if (result := shutil.which("ffmpeg")) is not None:
        return result
    try:
        import imageio_ffmpeg
    except ImportError:
        return None
    return imageio_ffmpeg.get_ffmpeg_exe()
