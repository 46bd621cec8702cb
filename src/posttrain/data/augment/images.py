"""Varies images by crop, flip and colour jitter; each variant is a new file named by its content."""

import hashlib
import io
import os
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from posttrain.data.augment.method import AugmentMethod
from posttrain.store.errors import UserError
from posttrain.store.files import make_folder, write_atomically
from posttrain.store.installation import install_command

_TINTS = ("brightness", "contrast", "colour")


class Images(AugmentMethod):
    """Crops, flips and tints the ``image`` that a record's ``meta`` names, relative to the file of records.

    A crop of ``least_area`` or more, back at the old size (as Szegedy et al. 2015, arXiv:1409.4842; the shape stays),
    mirrored in half of the cases, and brightness, contrast and colour scaled by up to ``jitter``.
    The text stays as it is; the new image's name gives the variant an id of its own.
    """

    method: Literal["images"] = "images"
    folder: Path = Field(Path("augmented-images"), description="Folder for the new images.")
    base: Path = Field(Path("."), description="The folder from which files of records are named.")
    least_area: float = Field(0.8, gt=0, le=1, description="Least share of the area that a crop keeps; 1 for no crop.")
    flip: bool = Field(True, description="Mirror left and right; not for text, digits or maps.")
    jitter: float = Field(0.2, ge=0, lt=1, description="Largest change of brightness, contrast and colour; 0 for none.")

    @model_validator(mode="after")
    def _something_is_done(self) -> Self:
        if self.least_area == 1 and not self.flip and not self.jitter:
            raise ValueError("with no crop, no flip and no jitter nothing is left to do")
        return self

    def located(self, root: Path) -> Self:
        return self.model_copy(update={"folder": root / self.folder.expanduser(), "base": root / self.base})

    def check(self) -> None:
        _pillow()

    def key(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"folder", "base"})

    def meta(self, meta: dict[str, Any], source: str, rng: np.random.Generator) -> dict[str, Any] | None:
        name = meta.get("image")
        if not isinstance(name, str) or not name:
            return None
        source_folder = (self.base / source).parent
        image = _open_image(source_folder / name, source)
        content = self._varied(image, rng)
        # Named by its content: a repeated build finds the file, and no two variants overwrite each other.
        new = self.folder / f"{hashlib.sha256(content).hexdigest()[:32]}.png"
        if not new.exists():
            make_folder(self.folder)
            write_atomically(new, content)
        # Relative, so that the record is the same wherever the workspace lies.
        return {**meta, "image": Path(os.path.relpath(new, source_folder)).as_posix()}

    def _varied(self, image: Any, rng: np.random.Generator) -> bytes:
        pillow = _pillow()
        from PIL import ImageEnhance

        # Drawn whether or not they are used, so that switching the flip off does not change the crops.
        area, across, down, mirrored, *tints = rng.random(4 + len(_TINTS)).tolist()
        width, height = image.size
        # The root, as the setting is a share of the area.
        side = (self.least_area + (1 - self.least_area) * area) ** 0.5
        crop = max(1, round(width * side)), max(1, round(height * side))
        left, top = round((width - crop[0]) * across), round((height - crop[1]) * down)
        box = (left, top, left + crop[0], top + crop[1])
        image = image.resize((width, height), pillow.Resampling.BICUBIC, box=box)
        if self.flip and mirrored < 0.5:
            image = image.transpose(pillow.Transpose.FLIP_LEFT_RIGHT)
        if self.jitter:
            changes = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
            for change, tint in zip(changes, tints, strict=True):
                image = change(image).enhance(1 + self.jitter * (2 * tint - 1))
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        return buffer.getvalue()


def _open_image(path: Path, source: str) -> Any:
    pillow = _pillow()
    try:
        with pillow.open(path) as image:
            return image.convert("RGBA" if "A" in image.getbands() else "RGB")
    except FileNotFoundError:
        raise UserError("there is no such image", where=f"{source}: {path}", fix="check `image`") from None
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise UserError(f"cannot be read as an image: {error}", where=str(path)) from None


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        fix = install_command("pillow")
        raise UserError("Pillow is not installed", where="augment.images", fix=fix) from None
    return Image
