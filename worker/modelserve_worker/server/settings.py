"""What the front door lets in: settings of the HTTP server that the engine does not know."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class DoorSettings(BaseModel):
    """Settings of the server in front of the engine; none of them changes an answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    body_gap_seconds: float = Field(default=20.0, gt=0, description="Most seconds between two pieces of a body.")
    body_seconds: float = Field(default=120.0, gt=0, description="Most seconds for all of a body.")
