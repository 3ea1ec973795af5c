//! A step of AdamW.

use super::check;
use vm_ir::op::Axis;
use vm_ir::view::Access;
use vm_ir::{Scalar, Type};

#[test]
fn adamw() {
    check("adamw", |k| {
        k.block_size([128, 1, 1]);
        let parameters = k.view("parameters", Scalar::F32, 1, Access::ReadWrite);
        let gradients = k.view("gradients", Scalar::F32, 1, Access::Read);
        let first = k.view("first", Scalar::F32, 1, Access::ReadWrite);
        let second = k.view("second", Scalar::F32, 1, Access::ReadWrite);
        let rate = k.scalar("rate", Type::F32);
        let beta1 = k.scalar("beta1", Type::F32);
        let beta2 = k.scalar("beta2", Type::F32);
        let epsilon = k.scalar("epsilon", Type::F32);
        let decay = k.scalar("decay", Type::F32);
        let step = k.scalar_in("step", Type::I32, 1, i64::from(i32::MAX));
        let t = step.to(Scalar::F32);
        let correction1 = 1.0 - beta1.pow(t);
        let correction2 = 1.0 - beta2.pow(t);
        let stride = k.grid_dim(Axis::X).to(Scalar::I64) * 128;
        k.range(k.global_id(Axis::X), parameters.extent(0)).step(stride).each(|i| {
            let g = gradients.at([i]).load().named("g");
            let m = beta1.fma(first.at([i]).load(), (1.0 - beta1) * g).named("m");
            let v = beta2.fma(second.at([i]).load(), (1.0 - beta2) * g * g).named("v");
            let p = parameters.at([i]).load();
            let decayed = p - rate * decay * p;
            let update = m / correction1 / ((v / correction2).sqrt() + epsilon);
            first.at([i]).store(m);
            second.at([i]).store(v);
            parameters.at([i]).store(decayed - rate * update);
        });
    });
}
