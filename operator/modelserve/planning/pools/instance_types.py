"""Machines of clouds by the GPU in them: what a node group that has no node yet publishes of itself is often no more.

The cluster autoscaler makes a node template of the machine's type, region and zone (cloudprovider/aws/aws_manager.go,
cloudprovider/azure/azure_template.go: buildGenericLabels), and neither GPU feature discovery nor Karpenter has a say.
Types: https://aws.amazon.com/ec2/instance-types/ and
https://learn.microsoft.com/en-us/azure/virtual-machines/sizes/overview, read 2026-11. Machines with a part of a GPU are
left out.
"""

from __future__ import annotations

_SMALL = ("xlarge", "2xlarge", "4xlarge", "8xlarge", "12xlarge", "16xlarge")  # 24xlarge and above differ by family

_AWS = {
    "Tesla-T4": [*(f"g4dn.{size}" for size in _SMALL), "g4dn.metal"],
    "NVIDIA-A10G": [*(f"g5.{size}" for size in (*_SMALL, "24xlarge", "48xlarge"))],
    "NVIDIA-L4": [
        *(f"g6.{size}" for size in (*_SMALL, "24xlarge", "48xlarge")),
        "gr6.4xlarge",
        "gr6.8xlarge",
    ],
    "NVIDIA-L40S": [*(f"g6e.{size}" for size in (*_SMALL, "24xlarge", "48xlarge"))],
    "NVIDIA-A100-SXM4-40GB": ["p4d.24xlarge"],
    "NVIDIA-A100-SXM4-80GB": ["p4de.24xlarge"],
    "NVIDIA-H100-80GB-HBM3": ["p5.4xlarge", "p5.48xlarge"],
    "NVIDIA-H200": ["p5e.48xlarge", "p5en.48xlarge"],
    "NVIDIA-B200": ["p6-b200.48xlarge"],
}
_AZURE = {
    "Tesla-T4": ["Standard_NC4as_T4_v3", "Standard_NC8as_T4_v3", "Standard_NC16as_T4_v3", "Standard_NC64as_T4_v3"],
    "NVIDIA-A10": ["Standard_NV36ads_A10_v5", "Standard_NV36adms_A10_v5", "Standard_NV72ads_A10_v5"],
    "NVIDIA-A100-80GB-PCIe": ["Standard_NC24ads_A100_v4", "Standard_NC48ads_A100_v4", "Standard_NC96ads_A100_v4"],
    "NVIDIA-A100-SXM4-40GB": ["Standard_ND96asr_v4"],
    "NVIDIA-A100-SXM4-80GB": ["Standard_ND96amsr_A100_v4"],
    "NVIDIA-H100-NVL": ["Standard_NC40ads_H100_v5", "Standard_NC80adis_H100_v5"],
    "NVIDIA-H100-80GB-HBM3": ["Standard_ND96isr_H100_v5"],
    "NVIDIA-H200": ["Standard_ND96isr_H200_v5"],
}

INSTANCE_TYPES: dict[str, tuple[str, ...]] = {
    product: tuple(sorted([*_AWS.get(product, []), *_AZURE.get(product, [])])) for product in sorted({*_AWS, *_AZURE})
}
"""Values of the label node.kubernetes.io/instance-type by product."""

PRODUCT_OF_TYPE: dict[str, str] = {each: product for product, types in INSTANCE_TYPES.items() for each in types}
