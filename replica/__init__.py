"""The engine of one accelerator: scheduler, KV blocks, pipeline, sampling, model.

It knows nothing of Ray, HTTP or tenants' quotas; it is driven by the messages of
`replica.messages` and answers with one report per step.
"""
