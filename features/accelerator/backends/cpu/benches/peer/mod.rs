//! A peer of a bench: a Python program that does a piece of work for each line on its input, and prints the seconds it took.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

pub(crate) struct Peer {
    /// What it says it is.
    pub(crate) name: String,
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// The seconds of each turn.
    pub(crate) turns: Vec<f64>,
}

impl Peer {
    /// Starts a script beside the benches, which may use so many threads.
    ///
    /// # Errors
    /// There is no Python, or the script says nothing: it has no such peer.
    pub(crate) fn start(script: &str, arguments: &[String], threads: usize) -> std::io::Result<Peer> {
        let mut child = Command::new("python3")
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("benches").join(script))
            .args(arguments)
            // Threads that have nothing to do must not run while others are timed.
            .envs([("OMP_WAIT_POLICY", "passive"), ("KMP_BLOCKTIME", "0"), ("OPENBLAS_THREAD_TIMEOUT", "4")])
            .envs(["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"].map(|name| (name, threads.to_string())))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(std::io::ErrorKind::BrokenPipe.into());
        };
        let mut peer =
            Peer { name: String::new(), child, input, output: BufReader::new(output), turns: vec![] };
        peer.output.read_line(&mut peer.name)?;
        peer.name = peer.name.trim().to_owned();
        if peer.name.is_empty() { Err(std::io::ErrorKind::NotFound.into()) } else { Ok(peer) }
    }

    /// Lets it do its work once.
    pub(crate) fn turn(&mut self) {
        let mut line = String::new();
        let answers = writeln!(self.input).and_then(|()| self.output.read_line(&mut line));
        if let (Ok(_), Ok(seconds)) = (answers, line.trim().parse()) {
            self.turns.push(seconds);
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
