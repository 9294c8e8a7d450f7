"""The length head in a real cluster: it reads hidden states where prompts are computed, and learns
there from outputs that another instance writes."""

from __future__ import annotations

import pytest

from tests.e2e.client import ask, assert_handed_over_as_stock, until
from tests.e2e.cluster import Cluster, Stock
from tests.e2e.prompts import chat, completion

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

OWN = {"serve": ("--tetri-decode-order", "shortest")}  # the head is the default
# Prompts of one chunk and of several, outputs that the client bounds.
LENGTHS = [20 + 13 * at for at in range(12)]
ASKED = [completion(length, max_tokens=length // 2, ignore_eos=False) for length in LENGTHS]


async def test_outputs_teach_the_instance_that_has_their_prompts(
    stock: Stock, own: Cluster
) -> None:
    # One by one, so that none shares a chunk. Of several chunks one state is learnt.
    assert {(await ask(own.url, each)).status for each in ASKED} == {200}
    num_asked = len(ASKED)
    await until(lambda: own.instances()["prefill-0"]["length_states"] == num_asked, "it learns", 30)
    assert own.instances()["decode-0"]["length_states"] == 0
    log = (own.logs / "prefill-0.log").read_text()
    assert "output lengths are predicted from the hidden states after layer 1" in log
    fixed = completion(30, max_tokens=5, ignore_eos=True)  # tells nothing of the model
    before = own.instances()["prefill-0"]["length_states"]
    await assert_handed_over_as_stock(stock, own, [fixed, chat(100, ignore_eos=True)])
    # One instance serves what is echoed; what ends with its first token tells nothing either.
    echoed = completion(40, max_tokens=1, ignore_eos=False, echo=True)

    def num_done() -> int:
        return sum(each["decodes_done"] for each in own.instances().values())

    done_before = num_done()
    assert (await ask(own.url, echoed)).status == 200
    await until(lambda: num_done() > done_before, "it is told")
    assert own.instances()["prefill-0"]["length_states"] == before
    assert own.instances()["decode-0"]["length_states"] == 0
