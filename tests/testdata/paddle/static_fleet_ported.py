"""static_fleet.py, as each line of ``pserver check`` says."""

import os
import time

import torch

from pserver import DistributedEmbedding, Uniform, fleet, metrics

EMBEDDING = 8
SLOTS = 3


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = DistributedEmbedding(
            EMBEDDING, num_embeddings=1000001, name="emb", init=Uniform(-1.0, 1.0), pooling="sum"
        )
        self.fc_0 = torch.nn.Linear(SLOTS * EMBEDDING + 4, 32)
        self.fc_1 = torch.nn.Linear(32, 2)

    def forward(self, slots, dense):
        pooled = [self.emb(*each) for each in slots]
        joined = torch.concat(pooled + [dense], dim=1)
        hidden = torch.nn.functional.relu(self.fc_0(joined))
        return torch.nn.functional.softmax(self.fc_1(hidden), dim=1)


def main():
    role = fleet.CloudRoleMaker()
    fleet.init(role)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return

    model = fleet.distributed_model(Net())
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    strategy.a_sync_configs = {"k_steps": 0}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    fleet.init_worker()

    slots = [fleet.Slot(f"C{n}", "int64", width=None) for n in range(SLOTS)]
    dense = fleet.Slot("dense", "float32", 4)
    label = fleet.Slot("label", "int64", 0)
    dataset = fleet.QueueDataset()
    dataset.init(batch_size=16, thread_num=1, use_var=slots + [dense, label])
    files = sorted(os.path.join("data", f) for f in os.listdir("data"))
    dataset.set_filelist(files)
    for epoch in range(2):
        begin = time.time()
        auc = metrics.AUC()
        for batch in dataset:
            predict = model([batch[each.name] for each in slots], batch["dense"])
            loss = torch.nn.functional.nll_loss(predict.log(), batch["label"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            auc.update(predict[:, 1], batch["label"])
        value = auc.compute()
        if fleet.is_first_worker():
            print(f"epoch {epoch} took {time.time() - begin:.1f} s, AUC {value:.2f}")
    fleet.save("model")
    fleet.export("inference")
    fleet.stop_worker()


if __name__ == "__main__":
    main()
