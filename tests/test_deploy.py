"""Deployment files: valid for the program that reads them, and true about ours."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from hicache.config import load_config

Seconds = Annotated[str, Field(pattern=r"^[0-9]+s$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Global(_Strict):
    scrape_interval: Seconds
    scrape_timeout: Seconds


class _Targets(_Strict):
    targets: list[Annotated[str, Field(pattern=r"^[0-9a-z.]+:[0-9]+$")]]


class _Relabel(_Strict):
    source_labels: list[str]
    regex: str
    action: Literal["keep"]


class _Job(_Strict):
    job_name: str
    static_configs: list[_Targets]
    metric_relabel_configs: list[_Relabel]


class _Prometheus(_Strict):
    """The part of Prometheus' configuration format that is used here (prometheus.io, "Configuration")."""

    global_: _Global = Field(alias="global")
    scrape_configs: list[_Job]


def test_the_prometheus_configuration_is_valid(repository: Path) -> None:
    file = repository / "deploy/prometheus/prometheus.yml"
    config = _Prometheus.model_validate(yaml.safe_load(file.read_text()))
    assert int(config.global_.scrape_timeout[:-1]) < int(config.global_.scrape_interval[:-1])
    if (promtool := shutil.which("promtool")) is not None:
        subprocess.run([promtool, "check", "config", str(file)], check=True, timeout=60)


def test_prometheus_scrapes_where_the_example_configuration_listens(repository: Path) -> None:
    file = repository / "deploy/prometheus/prometheus.yml"
    (job,) = _Prometheus.model_validate(yaml.safe_load(file.read_text())).scrape_configs
    metrics = load_config(repository / "configs/single-node-file.yaml", environ={}, overrides={}).metrics
    assert job.static_configs[0].targets == [f"{metrics.host}:{metrics.port}"]
    (relabel,) = job.metric_relabel_configs
    assert re.fullmatch(relabel.regex, "hicache_backend_get_pages_total")
