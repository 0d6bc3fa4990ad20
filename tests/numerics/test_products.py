"""Whichever way a product goes, it is weight @ x, laid out feature by feature."""

from __future__ import annotations

import pytest
import torch

from corrente.engine.embedded import products


@pytest.mark.parametrize("skinny", [0, 4], ids=["avx2", "avx512"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 11, 12, 16, 127, 128])
@pytest.mark.parametrize("rows", [24, products.BLOCK * 6, products.BLOCK * 6 + 8])
def test_products_are_products(rows: int, tokens: int, skinny: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "SKINNY", skinny)
    torch.manual_seed(0)
    weight, x, target = torch.randn(rows, 40), torch.randn(40, tokens), torch.randn(rows, tokens)
    expected = (weight.double() @ x.double()).float()
    product = products.product(weight, x)
    assert product.is_contiguous()
    torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-5)
    after = target.clone()
    products.add_product(after, weight, x)
    torch.testing.assert_close(after, target + expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 11, 12, 13, 16, 127, 128, 130])
def test_width_has_a_column_for_every_token(tokens: int):
    width = products.width(tokens, torch.device("cpu"))
    assert tokens <= width < tokens + products.VECTOR
    assert products.width(tokens, torch.device("meta")) == tokens
