"""The workspace's memory: artifacts, runs, rounds, deployments and names, in one database."""

from posttrain.store.artifact_rows import ArtifactRows
from posttrain.store.name_rows import NameRows
from posttrain.store.records import ArtifactRow, Deployment, Named, Round, Run
from posttrain.store.round_rows import DeploymentRows, RoundRows
from posttrain.store.run_rows import RunRows

__all__ = ["ArtifactRow", "Deployment", "Metadata", "Named", "Round", "Run"]


class Metadata(ArtifactRows, RunRows, RoundRows, DeploymentRows, NameRows):
    """All rows of a workspace. Every method is one transaction, or part of the one that it is called in:

    ``with metadata.transaction(): metadata.add_artifact(...); metadata.finish_run(...)``
    """
