"""Batches of sentences, and the loss of distillation against its equation."""

import torch
from torch import nn

from benchmarks.methods import Budget
from benchmarks.sentences import SentenceBatches, Sentences, taught
from benchmarks.training import Settings, Trainer


def numbered(count: int) -> Sentences:
    lengths = torch.randint(1, 12, (count,), generator=torch.Generator().manual_seed(0))
    labels = torch.arange(count)
    return Sentences(torch.where(torch.arange(12) < lengths[:, None], labels[:, None] + 1, 0), labels)


def test_the_loss_is_the_papers_but_for_the_entropy_of_the_teacher() -> None:
    torch.manual_seed(0)
    student = torch.randn(7, 3, requires_grad=True)
    teacher, labels = torch.randn(7, 3), torch.randint(0, 3, (7,))
    log_p, log_q = teacher.log_softmax(1), student.log_softmax(1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(1).mean()
    expected = 0.95 * divergence - 0.05 * log_q[torch.arange(7), labels].mean()
    found = nn.functional.cross_entropy(student, taught(labels, teacher))
    entropy = -(log_p.exp() * log_p).sum(1).mean()
    torch.testing.assert_close(found, expected + 0.95 * entropy)
    torch.testing.assert_close(*(torch.autograd.grad(loss, student)[0] for loss in (found, expected)))


def test_the_shared_loop_takes_probabilities_for_labels() -> None:
    torch.manual_seed(0)
    data = Sentences(torch.tensor([[1, 2], [3, 4]]), taught(torch.tensor([0, 1]), torch.randn(2, 3)))
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3))
    expected = nn.functional.cross_entropy(model(data.ids), data.labels).item()
    trainer = Trainer(model, None, Budget(1, 1), Settings(rate=0.1))
    torch.testing.assert_close(trainer.epoch(SentenceBatches(data, 2, 0)), expected)


def test_parts_of_a_pass_have_every_sentence_once_and_little_padding() -> None:
    sentences = numbered(101)
    batches = SentenceBatches(sentences, 5, seed=1, parts=4)
    seen: list[int] = []
    padding = 0
    for part in range(4):
        found = list(batches.epoch(part))
        assert len(found) == len(batches) == 5
        for ids, labels in found:
            assert (ids[:, 0] - 1).equal(labels)
            assert (ids[:, -1] > 0).any()
            padding += int((ids == 0).sum())
            seen += labels.tolist()
    assert len(seen) == len(set(seen)) == 100
    assert padding < 0.1 * int(sentences.lengths.sum())


def test_a_part_is_the_same_for_every_method_and_differs_from_other_passes() -> None:
    first, second = (SentenceBatches(numbered(40), 5, seed=1, parts=2) for _ in range(2))
    for part in range(4):
        pairs = zip(first.epoch(part), second.epoch(part), strict=True)
        assert all(a.equal(c) and b.equal(d) for (a, b), (c, d) in pairs)
    labels = [torch.cat([labels for _, labels in first.epoch(part)]) for part in range(4)]
    assert not labels[0].equal(labels[2])


def test_plain_batches_cover_every_sentence() -> None:
    sentences = numbered(30)
    found = list(SentenceBatches(sentences, 5, seed=0).plain(sentences, 8))
    assert torch.cat([labels for _, labels in found]).sort().values.equal(sentences.labels)
    assert all((ids[:, 0] - 1).equal(labels) for ids, labels in found)
