import pytest
from support.training_layouts import *
from support.training_worlds import relative_errors
@pytest.mark.parametrize("name", sys_layouts if False else ["tp1","dp2","pp2","pp4","tp2","tp2-pp2"])
def test_measure(trained, reference, name):
    import torch
    base = trained("tp1"); w = trained(name)
    for c, r in w.cases.items():
        loss = c.split("-")[0] if not c.startswith("on") else "on-policy"
        ref = {"grpo":"grpo-reference","fault":"grpo-reference","sft":"sft-reference","on-policy":"on-policy-reference"}[loss]
        if c in ("grpo-cold","grpo-tied","grpo-steps"): ref=c
        e = relative_errors(r.gradients, base.cases[ref].gradients)
        top = sorted(e.items(), key=lambda x:-x[1])[:3]
        key=("tied" if "tied" in c else "tiny", 0.7 if "cold" in c else 1.0)
        dl = max(float((a-b).abs().max()) for a,b in zip(r.logprobs, reference.logprobs[key]))
        de = max(float((a-b).abs().max()) for a,b in zip(r.entropies, reference.entropies[key]))
        da = max(float((a-b).abs().max()) for a,b in zip(r.logprobs, r.annotated))
        dm = max(abs(v-base.cases[ref].metrics[k])/max(abs(base.cases[ref].metrics[k]),1e-6) for k,v in r.metrics.items())
        print(f"\n{name} {c}: logp {dl:.1e} ent {de:.1e} pass {da:.1e} metrics {dm:.1e} grads {[(n.replace('model.layers.',''),f'{v:.1e}') for n,v in top]}", end="")
        if r.weights:
            we=relative_errors(r.weights, base.cases[c].weights); n=max(we,key=we.get); print(" W",n,f"{we[n]:.1e}", r.grad_norms, end="")
    print("\n", w.unshimmed_modules, w.num_megatron_modules, w.cuda_available, w.deallocates_pipeline_outputs)
    if name=="tp1":
        e=relative_errors(base.cases["sft-reference"].gradients, reference.sft_gradients); print(sorted(e.items(), key=lambda x:-x[1])[:6])
        print(base.cases["grpo-reference"].metrics, base.cases["sft-reference"].metrics, reference.sft_loss)
