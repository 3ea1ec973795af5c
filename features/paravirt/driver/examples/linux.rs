//! Softmax of a matrix on an accelerator that the host shares, from an ordinary Linux program: run it as root in a guest
//! whose file has `[[accelerators]]` with `window`.

use std::error::Error;

use vm_paravirt_guest::linux::{Device, Stream};
use vm_paravirt_guest::protocol::{Argument, BatchWriter, Info, LogReader, NoRoom, Reply};
use vm_paravirt_guest::{Error as DeviceError, Transport as _};

const KERNELS: &str = include_str!("../../../../vm-ir/filetests/run/softmax.vir");
const SOFTMAX: u32 = 0;
const ROWS: usize = 64;
const COLUMNS: usize = 1000;
const BYTES: u64 = 4 * (ROWS * COLUMNS) as u64;

/// Numbers of the module and the buffers, of this program's choice.
const MODULE: u32 = 1;
const X: u32 = 1;
const Y: u32 = 2;

fn main() -> Result<(), Box<dyn Error>> {
    // A guest sends kernels in the IR's binary form.
    let module = vm_ir::binary::encode(&vm_ir::text::parse(KERNELS)?, vm_ir::binary::Lines::Strip);

    let device = Device::find()?;
    let window = device.window()?;
    let mut accelerator = device.connect()?;
    let name = run(&mut accelerator, |batch| batch.query(), accelerator_name)?;
    println!("the accelerator is {name}, with a window of {} MiB", window.bytes() >> 20);

    let x: Vec<f32> = (0..ROWS * COLUMNS).map(|i| (i * 37 % 1013) as f32 / 32.0 - 16.0).collect();
    let (input, output) = (window.take(BYTES)?, window.take(BYTES)?);
    input.write(0, &bytes_of(&x))?;
    let buffers = [input.range(0, BYTES)?, output.range(0, BYTES)?];
    // One batch does it all: the module, buffers over the window, the launch, and the wait for it.
    run(
        &mut accelerator,
        |batch| {
            batch.create_module(MODULE, &module)?;
            batch.import_buffer(X, &buffers[..1])?;
            batch.import_buffer(Y, &buffers[1..])?;
            let matrix = |buffer| Argument::view(buffer, 0, &[ROWS as u64, COLUMNS as u64]);
            batch.launch(MODULE, SOFTMAX, [ROWS as u32, 1, 1], &[matrix(X)?, matrix(Y)?])?;
            batch.fence()
        },
        |_| Ok(()),
    )?;
    let mut bytes = vec![0; BYTES as usize];
    output.read(0, &mut bytes)?;
    let y: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();

    let worst = worst_difference(&x, &y);
    println!("softmax of {ROWS} rows of {COLUMNS}: the greatest difference is {worst:.1e}");
    if worst < 1e-6 { Ok(()) } else { Err("the accelerator computed something else".into()) }
}

/// Does a batch, all of which must succeed, and looks at the reply.
fn run<T>(
    accelerator: &mut Stream,
    fill: impl FnOnce(&mut BatchWriter<'_>) -> Result<(), NoRoom>,
    look: impl FnOnce(Reply<'_>) -> Result<T, DeviceError>,
) -> Result<T, Box<dyn Error>> {
    let mut frame = accelerator.frame();
    let mut batch = frame.batch()?;
    fill(&mut batch)?;
    let bytes = batch.finish();
    let frame = accelerator.call(frame, bytes)?;
    let reply = frame.reply()?;
    match reply.check() {
        Ok(()) => Ok(look(reply)?),
        Err((operation, status)) => {
            let why = DeviceError::Status { operation, status };
            // The log says more than a status can.
            let mut frame = accelerator.frame();
            let mut batch = frame.batch()?;
            batch.log()?;
            let bytes = batch.finish();
            let frame = accelerator.call(frame, bytes)?;
            let (_, log) = frame.reply()?.results().next().ok_or(why)??;
            let text: Vec<String> =
                LogReader::new(log).flatten().map(|entry| entry.text.to_owned()).collect();
            Err(format!("{why}: {}", text.join("; ")).into())
        }
    }
}

fn accelerator_name(reply: Reply<'_>) -> Result<String, DeviceError> {
    let (_, answer) =
        reply.results().next().ok_or(DeviceError::Transport("it does not say what it is"))??;
    Ok(Info::decode(answer)?.name.to_owned())
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Between what came back and what this program computes itself.
fn worst_difference(x: &[f32], y: &[f32]) -> f64 {
    let rows = x.chunks_exact(COLUMNS).zip(y.chunks_exact(COLUMNS));
    rows.flat_map(|(x, y)| {
        let sum: f64 = x.iter().map(|x| f64::from(*x).exp()).sum();
        x.iter().zip(y).map(move |(x, y)| (f64::from(*x).exp() / sum - f64::from(*y)).abs())
    })
    .fold(0.0, f64::max)
}
