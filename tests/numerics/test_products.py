"""Whichever way a product goes, it is weight @ x, laid out feature by feature."""

from __future__ import annotations

import pytest
import torch

from corrente.engine.embedded import matmul


@pytest.mark.parametrize("skinny", [0, 4], ids=["avx2", "avx512"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 11, 12, 16, 127, 128])
@pytest.mark.parametrize("rows", [24, matmul.BLOCK * 6, matmul.BLOCK * 6 + 8])
def test_products_are_products(rows: int, tokens: int, skinny: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(matmul, "SKINNY", skinny)
    torch.manual_seed(0)
    weight, x, target = torch.randn(rows, 40), torch.randn(40, tokens), torch.randn(rows, tokens)
    expected = (weight.double() @ x.double()).float()
    product = matmul.matmul(weight, x)
    assert product.is_contiguous()
    torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-5)
    after = target.clone()
    matmul.add_matmul(after, weight, x)
    torch.testing.assert_close(after, target + expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 11, 12, 13, 16, 127, 128, 130])
def test_width_has_a_column_for_every_token(tokens: int):
    padded_columns = matmul.padded_columns(tokens, torch.device("cpu"))
    assert tokens <= padded_columns < tokens + matmul.VECTOR
    assert matmul.padded_columns(tokens, torch.device("meta")) == tokens
