//! PyTorch in a process of its own: once for all that is measured, or when it is asked, so that ours and its peer are measured in
//! turns, each on a device as warm as the other's.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;

/// How long an answer may take: PyTorch's own start, or one measurement.
const TIMEOUT: Duration = Duration::from_secs(60);
/// For so long what is measured runs before it is measured, so that clocks and temperature are those of a device at work.
pub(crate) const WARM: Duration = Duration::from_millis(150);

/// What a library has to say of a work: the seconds of a call by measurement, or why there are none.
pub(crate) type Answer = Result<Vec<f64>, String>;

/// The process. It is killed when this is dropped.
pub(crate) struct Peer {
    child: Child,
    questions: ChildStdin,
    answers: Receiver<String>,
}

impl Peer {
    /// Starts a script. It answers each line that it reads with a line of JSON, and says `ready` first.
    ///
    /// # Errors
    /// What the script says, or why there is no Python.
    pub(crate) fn start(script: &str) -> Result<Peer, String> {
        let piped = Stdio::piped;
        let mut child = Command::new("python3")
            .args(["-c", script])
            .stdin(piped())
            .stdout(piped())
            .stderr(piped())
            .spawn()
            .map_err(|error| format!("python3: {error}"))?;
        let (Some(questions), Some(out), Some(mut err)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err("python3 has no pipes".into());
        };
        let (sender, answers) = mpsc::channel();
        std::thread::spawn(move || {
            // Ends with the process, or with who reads.
            let lines = BufReader::new(out).lines().map_while(Result::ok);
            lines.map(|line| sender.send(line)).take_while(Result::is_ok).for_each(drop);
        });
        // What it warns of does not fill the pipe; its last line says why it ended.
        let said = std::thread::spawn(move || {
            let mut said = String::new();
            let _ = err.read_to_string(&mut said);
            said.trim().lines().last().unwrap_or("it ended").to_owned()
        });
        let peer = Peer { child, questions, answers };
        match peer.line() {
            Ok(_) => Ok(peer),
            Err(error) => {
                drop(peer);
                Err(said.join().unwrap_or(error))
            }
        }
    }

    /// The next line that it says.
    fn line(&self) -> Result<String, String> {
        self.answers.recv_timeout(TIMEOUT).map_err(|error| format!("python3 does not answer: {error}"))
    }

    /// Its answer to a line.
    ///
    /// # Errors
    /// It has ended, takes too long, or answers something else. It is of no use then: what it says next may answer this.
    pub(crate) fn ask<T: DeserializeOwned>(&mut self, question: &str) -> Result<T, String> {
        writeln!(self.questions, "{question}").map_err(|error| format!("python3 reads no more: {error}"))?;
        serde_json::from_str(&self.line()?).map_err(|error| format!("the answer of python3: {error}"))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Does something again and again, at least once, for as long as [`WARM`].
pub(crate) fn warm<E>(mut once: impl FnMut() -> Result<(), E>) -> Result<(), E> {
    let end = Instant::now() + WARM;
    loop {
        once()?;
        if Instant::now() >= end {
            return Ok(());
        }
    }
}

/// Runs a script with arguments in a Python of its own, and reads the JSON that it prints last.
///
/// # Errors
/// What the script says, or why there is no Python.
pub(crate) fn run<T: DeserializeOwned>(script: &str, arguments: &[String]) -> Result<T, String> {
    let output = Command::new("python3")
        .args(["-c", script])
        .args(arguments)
        .output()
        .map_err(|error| format!("python3: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(said.trim().lines().last().unwrap_or("python3 failed").to_owned());
    }
    // What a part of the script could not do.
    eprint!("{said}");
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.trim().lines().last().unwrap_or_default();
    serde_json::from_str(last).map_err(|error| format!("the answer of python3: {error}"))
}
