"""A click model of PaddlePaddle in a static graph, trained by fleet: before ``pserver check``."""

import os
import time

import paddle
import paddle.distributed.fleet as fleet
import paddle.static as static
from paddle.distributed.fleet.base import role_maker

paddle.enable_static()

EMBEDDING = 8
SLOTS = 3


def net(slots, dense, label):
    embedded = [
        static.nn.sparse_embedding(
            each,
            size=[1000001, EMBEDDING],
            param_attr=paddle.ParamAttr(name="emb", initializer=paddle.nn.initializer.Uniform()),
        )
        for each in slots
    ]
    pooled = [paddle.static.nn.sequence_pool(each, pool_type="sum") for each in embedded]
    joined = paddle.concat(pooled + [dense], axis=1)
    hidden = static.nn.fc(joined, size=32, activation="relu", name="fc_0")
    predict = static.nn.fc(hidden, size=2, activation="softmax")
    cost = paddle.nn.functional.cross_entropy(predict, label, use_softmax=False)
    loss = paddle.mean(cost)
    auc, batch_auc, _ = static.auc(input=predict, label=label)
    return loss, auc, predict


def main():
    role = role_maker.PaddleCloudRoleMaker(is_collective=False)
    fleet.init(role)
    main_program, startup = static.Program(), static.Program()
    with static.program_guard(main_program, startup):
        slots = [
            static.data(name=f"C{n}", shape=[None, 1], dtype="int64", lod_level=1)
            for n in range(SLOTS)
        ]
        dense = static.data(name="dense", shape=[None, 4], dtype="float32")
        label = static.data(name="label", shape=[None, 1], dtype="int64")
        loss, auc, predict = net(slots, dense, label)

        strategy = fleet.DistributedStrategy()
        strategy.a_sync = True
        strategy.a_sync_configs = {"k_steps": 0}
        optimizer = paddle.optimizer.Adam(learning_rate=0.01, lazy_mode=True)
        optimizer = fleet.distributed_optimizer(optimizer, strategy)
        optimizer.minimize(loss)

    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return

    place = paddle.CPUPlace()
    exe = static.Executor(place)
    exe.run(startup)
    fleet.init_worker()

    dataset = fleet.QueueDataset()
    dataset.init(
        batch_size=16,
        thread_num=1,
        use_var=slots + [dense, label],
        pipe_command="cat",
        input_type=0,
    )
    files = fleet.util.get_file_shard(sorted(os.path.join("data", f) for f in os.listdir("data")))
    dataset.set_filelist(files)
    for epoch in range(2):
        begin = time.time()
        exe.train_from_dataset(
            program=main_program,
            dataset=dataset,
            fetch_list=[loss, auc],
            fetch_info=["loss", "auc"],
            print_period=10,
            debug=False,
        )
        if fleet.is_first_worker():
            print(f"epoch {epoch} took {time.time() - begin:.1f} s")
    if fleet.is_first_worker():
        fleet.save_persistables(exe, "model", main_program)
        fleet.save_inference_model(exe, "inference", ["C0", "C1", "C2", "dense"], [predict])
    fleet.stop_worker()


if __name__ == "__main__":
    main()
