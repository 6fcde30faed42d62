r"""Turn a video of ``marl-pool render`` into an animated WebP for a web page.

    marl-pool render pretrained=cartpole_attention_neuron_reshuffled size=256 fps=30 \
      perturbation=shuffle perturbation.every=25 beside_clean=true --out cartpole
    python scripts/animate.py cartpole/videos/shuffle.webm \
      --out docs/images/cartpole_shuffled.webp

Browsers and GitHub play it like a GIF, at a fraction of the size.
"""

import argparse
from pathlib import Path

import cv2
from PIL import Image


def main() -> None:
    """Read the arguments, then convert."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("video", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", type=int, default=4, help="keep each n-th frame")
    parser.add_argument("--fps", type=int, default=20, help="frames a second")
    arguments = parser.parse_args()
    frames = read(arguments.video)[:: arguments.every]
    first, *rest = frames
    first.save(
        arguments.out,
        save_all=True,
        append_images=rest,
        duration=1000 // arguments.fps,  # milliseconds
        loop=0,
        quality=60,
        method=4,
    )


def read(video: Path) -> list[Image.Image]:
    """Decode all frames of a video."""
    capture, frames = cv2.VideoCapture(str(video)), []
    while (decoded := capture.read())[0]:
        frames.append(Image.fromarray(cv2.cvtColor(decoded[1], cv2.COLOR_BGR2RGB)))
    if not frames:
        raise SystemExit(f"{video}: expected a video, got no frames")
    return frames


if __name__ == "__main__":
    main()
