"""The config section ``select.scoring``."""

from collections.abc import Collection
from pathlib import Path

from pydantic import Field

from posttrain.store.errors import UserError
from posttrain.store.paths import locate_path
from posttrain.store.section import Section

CHAMPION = "champion"


class ScoringConfig(Section):
    """Settings of the scores, and the model that embeds records."""

    embeddings: str = Field(
        default=CHAMPION,
        description="Embeddings of the records: the champion's hidden states, or a sentence model, as a folder, a Hub "
        "id or `minilm`.",
    )

    passes: int = Field(default=8, ge=2, description="bald: passes with dropout, each over all records.")
    dropout: float = Field(default=0.1, gt=0, lt=1, description="bald: share of each linear layer's inputs left out.")
    committee: int = Field(default=4, ge=2, description="vote_entropy, consensus_kl: the latest so many champions.")
    samples: int = Field(default=5, ge=2, description="Answers that are sampled for each record.")
    temperature: float = Field(default=1.0, gt=0, description="Temperature at which answers are sampled.")
    embedder: str = Field(
        default="minilm", description="semantic_entropy: a sentence model, as a folder, a Hub id or `minilm`."
    )
    similarity: float = Field(
        default=0.8, gt=-1, le=1, description="semantic_entropy: cosine from which two answers mean the same."
    )
    judge: str | None = Field(
        default=None, description="entailment_entropy: folder of the model that judges; the champion by default."
    )
    calibration: int = Field(
        default=500,
        ge=0,
        description="At most so many answers of the first suite set the temperature of probabilities; 0: none.",
    )

    def check_models(self, names: Collection[str], root: Path) -> None:
        """Checks that the models that scores use besides the champion exist, without loading one.

        Args:
            names: names of the scores that are computed.
            root: the workspace's folder.

        Raises:
            UserError: one is missing.
        """
        embedders = {"embeddings": self.embeddings} if self.embeddings != CHAMPION else {}
        embedders |= {"embedder": self.embedder} if any(name.startswith("semantic_entropy") for name in names) else {}
        if embedders:
            from posttrain.models.embedder_source import find_embedder

            for key, name in embedders.items():
                try:
                    find_embedder(name)
                except UserError as error:
                    raise UserError(str(error), where=f"select.scoring.{key}") from None
        if self.judge is not None and any(name.startswith("entailment_entropy") for name in names):
            from posttrain.models.sources import check_model_folder

            check_model_folder(self.judge_folder(root))

    def judge_folder(self, root: Path) -> Path:
        """Returns the judge's folder; a relative one is below the workspace's."""
        return locate_path(root, self.judge or "")
