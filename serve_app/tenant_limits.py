"""What a tenant may ask of a model, beyond what the model itself can do."""

from __future__ import annotations

from dataclasses import replace

from router.tenant import Tenant
from serve_app.backend import ServedModel
from serve_app.errors import ApiError


def limited(model: ServedModel, tenant: Tenant) -> ServedModel:
    """The model as the tenant sees it: with its own context. Raises ApiError if it may not use
    it, which looks as if there were no such model."""
    if not tenant.may_use(model.name):
        raise ApiError(404, "There is no such model.", param="model", code="model_not_found")
    if tenant.max_context is None or tenant.max_context >= model.max_model_len:
        return model
    return replace(model, max_model_len=tenant.max_context)
