//! What the daemon does with guests. Everything here may wait, and is called by threads that may.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use rustix::process::{Signal, pidfd_send_signal};
use serde_json::Value;
use vm_passthrough::readiness::{ExplainOptions, Explainer};
use vm_passthrough::{Host, PassthroughManager, PciAddress, PciFunction, pci};

use super::events::Events;
use super::launch::{Launch, Launched, Plan};
use super::watch::Watched;
use super::{LogOptions, StopOptions};
use crate::api::{
    AttachRequest, DetachRequest, DeviceState, Function, GuestLog, GuestState, GuestStatus, ListedFunction,
    Part, Readiness, Refusal, RefusalCode, StartOptions, StoppedHow,
};
use crate::config::{ConfigError, GuestConfig, is_name, name_rule};
use crate::deadlines::{
    CONTROL_ANSWER, GUEST_ATTACH, GUEST_DETACH, GUEST_KILL, GUEST_RESET, guest_start, guest_stop,
};
use crate::devices::health;
use crate::failure::{EXIT_BLOCKED, EXIT_USAGE};
use crate::guest::control::{self, CallError, Caller, Connection, GuestHome, HomeError, LOG, PREVIOUS_LOG};
use crate::text::describe;
use crate::vmm;

/// How long to wait before a guest is asked again how far it has come, at first and at most: asking takes time from a slow machine.
const POLL: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(250)];
/// Most requests for one guest that wait, each with a connection to it. The guest serves more connections: its status can be
/// read, and its power cut, whatever else waits.
pub(super) const MAX_WAITING: usize = 8;
/// Most bytes of a log that are told.
const MAX_LOG: u64 = 256 << 10;

/// The guests of a host.
pub(super) struct Guests {
    host: Host,
    launch: Box<dyn Launch>,
    events: Events,
    watched: Arc<Watched>,
    /// How many requests wait for each guest.
    waiting: Mutex<BTreeMap<String, usize>>,
    /// How long a guest may take to start.
    pub(super) start_within: fn(&GuestConfig) -> Duration,
}

type Result<T, E = Refusal> = std::result::Result<T, E>;

impl Guests {
    /// Those of `host`; `launch` makes processes for new ones, and `events` tells what happens.
    pub(super) fn new(host: Host, launch: Box<dyn Launch>, events: Events) -> Self {
        let watched = Arc::new(Watched::new(host.clone(), events.clone()));
        Self { host, launch, events, watched, waiting: Mutex::default(), start_within: guest_start }
    }

    pub(super) fn host(&self) -> &Host {
        &self.host
    }

    pub(super) fn events(&self) -> &Events {
        &self.events
    }

    /// Those that are watched.
    pub(super) fn watched(&self) -> &Arc<Watched> {
        &self.watched
    }

    /// All that run, by name. They are asked at once, so that those that do not answer keep nobody from hearing of the others.
    ///
    /// # Errors
    /// When they can't be listed.
    pub(super) fn list(&self) -> Result<Vec<GuestStatus>> {
        let names = control::names(&self.host);
        let names =
            names.map_err(|error| Refusal::failed(format_args!("the guests can't be listed: {error}")))?;
        let asked = names.iter().filter_map(|name| Some((name, Connection::reach(&self.host, name).ok()?)));
        std::thread::scope(|scope| {
            let asked: Vec<_> = asked
                .map(|(name, guest)| {
                    let process = guest.process_id();
                    let thread = Builder::new().name("asks".into());
                    (name, process, thread.spawn_scoped(scope, move || ask(guest)))
                })
                .collect();
            let answers = asked.into_iter().filter_map(|(name, process, thread)| {
                let failed =
                    || CallError::Io { guest: name.clone(), source: io::ErrorKind::OutOfMemory.into() };
                match thread.ok().and_then(|thread| thread.join().ok()).unwrap_or_else(|| Err(failed())) {
                    Ok(status) => Some(self.with_devices(status)),
                    Err(CallError::NotRunning(_) | CallError::Ended(_)) => None,
                    Err(error) => {
                        tracing::warn!("{error}");
                        Some(GuestStatus::of_unresponsive(name, process))
                    }
                }
            });
            Ok(answers.collect())
        })
    }

    /// How one is.
    ///
    /// # Errors
    /// When it does not run, or does not answer.
    pub(super) fn status(&self, name: &str) -> Result<GuestStatus> {
        Ok(self.with_devices(self.connect(name)?.status()?))
    }

    /// With what the daemon knows of its devices, whatever it says of them itself.
    fn with_devices(&self, mut guest: GuestStatus) -> GuestStatus {
        for device in &mut guest.devices {
            device.health = self.watched.monitor().health(&guest.name, &device.address);
        }
        guest.dma_bytes = memory_of(&self.host, guest.pid).map(|memory| memory.pinned);
        guest
    }

    /// Starts a guest from the contents of its file, and waits until it runs with its devices. One that takes too long is ended.
    ///
    /// # Errors
    /// When the file is wrong, the name is taken, or the guest does not start.
    pub(super) fn start(&self, name: &str, options: &StartOptions, file: toml::Value) -> Result<GuestStatus> {
        let (text, config) = read(name, file)?;
        let home = GuestHome::take(&self.host, name).map_err(|error| match error {
            HomeError::Taken(_) => Refusal::new(RefusalCode::Conflict, error),
            HomeError::Unusable { .. } => Refusal::failed(error),
        })?;
        let folder = home.path().to_owned();
        // What is reported of an earlier guest of this name comes before that.
        let place = self.watched.place(name, CONTROL_ANSWER).ok_or_else(|| {
            let lives = format!("a guest named {name} runs, though its directory was removed; stop it first");
            Refusal::new(RefusalCode::Conflict, lives)
        })?;
        let launched = (|| -> io::Result<_> {
            let (own, connection) = UnixStream::pair()?;
            create(&folder.join("guest.toml"))?.write_all(text.as_bytes())?;
            let log = create(&folder.join(LOG))?;
            // The next guest of this name renames it.
            let said = open_log(&folder.join(LOG))?;
            let (lock, home) = (home.into_lock()?, &folder);
            let devices = config.devices.len();
            let plan = Plan { host: &self.host, name, home, lock, log, connection, devices, options };
            let launched = self.launch.launch(plan)?;
            place.follow(Connection::of(name, own));
            Ok((launched, said))
        })();
        let (mut launched, said) = launched.map_err(|error| {
            Refusal::failed(format_args!("no process can be made for the guest {name}: {error}"))
        })?;
        let started = self.wait_for_start(&config, options, &mut *launched, said);
        // Somebody has to wait for the process, whenever it ends.
        let reaper = std::thread::Builder::new().name("reaper".into()).spawn(move || launched.wait());
        if let Err(error) = reaper {
            tracing::warn!(guest = name, "no thread waits for the process of the guest {name}: {error}");
        }
        started
    }

    fn wait_for_start(
        &self,
        config: &GuestConfig,
        options: &StartOptions,
        launched: &mut dyn Launched,
        said: File,
    ) -> Result<GuestStatus> {
        let deadline = (self.start_within)(config);
        let until = Instant::now() + deadline;
        let [mut pause, longest] = POLL;
        let is_attached = |status: &GuestStatus, address: &str| {
            status.devices.iter().any(|own| own.address == address && own.state == DeviceState::Attached)
        };
        loop {
            let status = self.connect(&config.name).and_then(|mut guest| guest.status());
            // First: what answered may be the next guest of this name.
            if let Some(exit) = launched.ended().map_err(Refusal::failed)? {
                let refusal = why_ended(&config.name, exit, said);
                let blockers = match refusal.code {
                    RefusalCode::Blocked => self.blockers(config, options),
                    _ => Vec::new(),
                };
                return Err(Refusal { blockers, ..refusal });
            }
            if let Ok(status) = &status
                && status.state == GuestState::Running
                && config.devices.iter().all(|device| is_attached(status, &device.to_string()))
            {
                return Ok(status.clone());
            }
            if Instant::now() >= until {
                let late = format!(
                    "the guest {} did not run with its devices within {} s, and was ended; see `vm-service logs {0}`",
                    config.name,
                    deadline.as_secs()
                );
                return Err(self.give_up(&config.name, launched, late));
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(longest);
        }
    }

    /// Ends a guest that does not start, and answers why it does not.
    fn give_up(&self, name: &str, launched: &mut dyn Launched, late: String) -> Refusal {
        let home = GuestHome::id_of(&self.host, name);
        if let Err(refusal) =
            self.stop(name, &StopOptions { now: true, ..StopOptions::default() }, &Caller::default())
        {
            tracing::debug!("{}; its process is killed", refusal.message);
            // It fails on a process that has ended.
            let _ = launched.kill();
            if !GuestHome::has_ended(&self.host, name, home, GUEST_KILL) {
                return refusal;
            }
            self.watched.recover();
        }
        Refusal::new(RefusalCode::Timeout, late)
    }

    /// What keeps a guest from having its devices, as its own process says in words.
    fn blockers(&self, config: &GuestConfig, options: &StartOptions) -> Vec<Readiness> {
        let mut explain = vmm::explain_options(config, Some(&self.host.dev.join("kvm")));
        explain.with_group = options.with_group;
        explain.accept = options.accept.iter().map(Into::into).collect();
        let functions: Result<Vec<_>, _> =
            config.devices.iter().map(|&address| pci::read_function(&self.host, address)).collect();
        let explained = functions.map_err(|error| error.to_string()).and_then(|functions| {
            let functions: Vec<_> = functions.iter().collect();
            let explained = Explainer::new(&self.host).explain_guest(&functions, &explain);
            explained.map_err(|error| error.to_string())
        });
        let explained = explained.unwrap_or_else(|error| {
            tracing::debug!("the devices of {} can't be explained: {error}", config.name);
            Vec::new()
        });
        explained.iter().map(Readiness::from).collect()
    }

    /// Has a guest power itself off, or cuts its power, or kills its process when that does not answer, and waits until everything
    /// is released. Answers how it ended, whoever wanted that. Leaves the power on if the caller disconnects first.
    ///
    /// # Errors
    /// When it does not run, or does not end in time.
    pub(super) fn stop(&self, name: &str, options: &StopOptions, caller: &Caller) -> Result<StoppedHow> {
        check_runs(name)?;
        let _slot = if options.now { None } else { Some(self.slot(name)?) };
        let home = GuestHome::id_of(&self.host, name);
        let mut guest = Connection::reach(&self.host, name)?;
        let mut end = end(&mut guest, options, caller);
        if matches!(end, CallError::Timeout { .. }) {
            let killed = guest.process().and_then(|process| Ok(pidfd_send_signal(process, Signal::KILL)?));
            match killed {
                Ok(()) => {
                    tracing::warn!(guest = name, "the guest {name} did not end; its process was killed")
                }
                Err(error) => {
                    tracing::warn!(guest = name, "the process of the guest {name} can't be killed: {error}")
                }
            }
            end = guest.wait_for_end(GUEST_KILL);
        }
        match end {
            CallError::Ended(_) if GuestHome::has_ended(&self.host, name, home, GUEST_KILL) => {}
            CallError::Ended(_) | CallError::Timeout { .. } => {
                let late = format!(
                    "the guest {name} was asked to end, and its process lives on; see `vm-service logs {name}` and the host's \
                     kernel log"
                );
                return Err(Refusal::new(RefusalCode::Timeout, late));
            }
            error => return Err(error.into()),
        }
        let how = guest.how().unwrap_or(StoppedHow::Killed);
        if how == StoppedHow::Killed {
            self.watched.recover();
        }
        Ok(how)
    }

    /// Resets a guest's machine, and waits until the guest has restarted.
    ///
    /// # Errors
    /// When it does not run, refuses, or does not restart.
    pub(super) fn reset(&self, name: &str, caller: &Caller) -> Result<()> {
        let _slot = self.slot(name)?;
        Ok(self.connect_for(name, caller)?.reset(GUEST_RESET)?)
    }

    /// Gives a guest a device.
    ///
    /// # Errors
    /// When it does not run, or can't have the device.
    pub(super) fn attach(&self, name: &str, request: AttachRequest, caller: &Caller) -> Result<Value> {
        let _slot = self.slot(name)?;
        Ok(self.connect_for(name, caller)?.attach(request, GUEST_ATTACH)?)
    }

    /// Takes a device from a guest.
    ///
    /// # Errors
    /// When it does not run, has no such device, or does not let go of it.
    pub(super) fn detach(&self, name: &str, request: DetachRequest, caller: &Caller) -> Result<Value> {
        let _slot = self.slot(name)?;
        let deadline = Duration::from_millis(request.options.deadline_ms);
        Ok(self.connect_for(name, caller)?.detach(request, deadline.saturating_add(GUEST_DETACH))?)
    }

    /// A part of a guest's log, or its end, also of one that does not run any more.
    ///
    /// # Errors
    /// When the daemon has not started a guest of this name.
    pub(super) fn log(&self, name: &str, options: &LogOptions) -> Result<GuestLog> {
        check_name(name)?;
        let ended = options.previous || !GuestHome::is_taken(&self.host, name);
        let file = if options.previous { PREVIOUS_LOG } else { LOG };
        let path = GuestHome::path_of(&self.host, name).join(file);
        let (log, next) = open_log(&path).and_then(|log| part_of(log, options.from, ended)).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Refusal::new(
                RefusalCode::NotFound,
                format_args!("there is no {file} of a guest {name}: only guests that `vm-service start` started have one here"),
            ),
            _ => Refusal::failed(format_args!("{} can't be read: {error}", path.display())),
        })?;
        Ok(GuestLog { guest: name.to_owned(), log, next, ended })
    }

    /// The host's accelerators, each with whether it can be passed to a guest.
    ///
    /// # Errors
    /// When the host can't be scanned.
    pub(super) fn devices(&self) -> Result<Vec<ListedFunction>> {
        self.listed(|function| describe::is_accelerator(function.device_type))
    }

    /// A function of the host, with whether it can be passed to a guest.
    ///
    /// # Errors
    /// When it is not there, or the host can't be scanned.
    pub(super) fn device(&self, address: PciAddress) -> Result<ListedFunction> {
        let not_there = || Refusal::new(RefusalCode::NotFound, describe::not_there(address));
        let mut listed = self.listed(|function| function.address == address)?.pop().ok_or_else(not_there)?;
        listed.health = health::read(&self.host, address);
        listed.parts = pci::parts(&self.host, address).iter().map(Part::from).collect();
        Ok(listed)
    }

    fn listed(&self, wanted: impl Fn(&PciFunction) -> bool) -> Result<Vec<ListedFunction>> {
        let mut manager = PassthroughManager::with_host(self.host.clone()).map_err(Refusal::failed)?;
        manager.scan_devices().map_err(Refusal::failed)?;
        let mut options = ExplainOptions::default();
        options.check_open_files = false;
        let explainer = Explainer::new(&self.host);
        let mut listed = Vec::new();
        for function in manager.devices() {
            if !wanted(function) {
                continue;
            }
            // One that has vanished since is left out.
            if let Ok(readiness) = explainer.explain_function(function.clone(), &options) {
                let others = manager.devices().iter().filter(|other| {
                    function.iommu_group.is_some()
                        && other.iommu_group == function.iommu_group
                        && other.address != function.address
                });
                listed.push(ListedFunction::new(Function::new(function, others), &readiness));
            }
        }
        Ok(listed)
    }

    /// Counts a request that waits for a guest.
    fn slot(&self, name: &str) -> Result<Slot<'_>> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let count = waiting.entry(name.to_owned()).or_default();
        if *count >= MAX_WAITING {
            let busy = format!("{MAX_WAITING} requests wait for the guest already; try again later");
            return Err(Refusal::new(RefusalCode::Busy, busy));
        }
        *count += 1;
        Ok(Slot { guests: self, name: name.to_owned() })
    }

    fn connect(&self, name: &str) -> Result<Connection, CallError> {
        check_runs(name)?;
        Connection::open(&self.host, name)
    }

    /// Connects to a guest. Waits for its answers end when the caller disconnects.
    fn connect_for(&self, name: &str, caller: &Caller) -> Result<Connection, CallError> {
        let mut guest = self.connect(name)?;
        guest.wait_for(caller);
        Ok(guest)
    }
}

/// A request that waits for a guest, until this is dropped.
struct Slot<'a> {
    guests: &'a Guests,
    name: String,
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        let mut waiting = self.guests.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = waiting.get_mut(&self.name) {
            *count -= 1;
        }
        waiting.retain(|_, count| *count > 0);
    }
}

/// No guest runs by what is no name.
fn check_runs(name: &str) -> Result<(), CallError> {
    if is_name(name) { Ok(()) } else { Err(CallError::NotRunning(crate::text::table::printable(name))) }
}

fn ask(mut guest: Connection) -> Result<GuestStatus, CallError> {
    guest.hello()?;
    guest.status()
}

/// Has a guest end, and waits for that; answers why it is waited for no longer.
fn end(guest: &mut Connection, options: &StopOptions, caller: &Caller) -> CallError {
    let until = Instant::now() + Duration::from_millis(options.deadline_ms);
    let status = guest.subscribe(Some(CONTROL_ANSWER));
    let devices = status.as_ref().map_or(0, |status| status.devices.len());
    let mut asked = status.map(drop);
    if !options.now {
        guest.wait_for(caller);
        asked = asked.and_then(|()| guest.power_button());
        // What does not answer may end in time all the same.
        if matches!(asked, Ok(()) | Err(CallError::Timeout { .. })) {
            match guest.wait_for_end(until.saturating_duration_since(Instant::now())) {
                CallError::Timeout { .. } => asked = Ok(()),
                error => return error,
            }
        }
    }
    // A power cut is completed even if the caller disconnects.
    guest.wait_for(&Caller::default());
    match asked.and_then(|()| guest.stop()) {
        Ok(()) => guest.wait_for_end(guest_stop(devices)),
        Err(error) => error,
    }
}

impl From<CallError> for Refusal {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Refused(refusal) => refusal,
            CallError::NotRunning(_) | CallError::HasEnded(_) => Self::new(RefusalCode::NotFound, error),
            CallError::Timeout { .. } => Self::new(RefusalCode::Timeout, error),
            CallError::Ended(_) | CallError::Abandoned(_) | CallError::Io { .. } => Self::failed(error),
        }
    }
}

fn check_name(name: &str) -> Result<()> {
    if is_name(name) {
        return Ok(());
    }
    Err(Refusal::invalid("name", format!("no guest may have this name; {}", name_rule())))
}

/// The text of a guest's file and the guest, from the file as JSON.
fn read(name: &str, file: toml::Value) -> Result<(String, GuestConfig)> {
    check_name(name)?;
    let toml::Value::Table(mut file) = file else {
        return Err(Refusal::new(RefusalCode::Invalid, "the body is not as it should be: expected a map"));
    };
    let named = file.entry("name").or_insert_with(|| name.into());
    if named.as_str() != Some(name) {
        let other =
            format!("the file's `name` is another than the {name} that is to be started; leave it out");
        return Err(Refusal::invalid("name", other));
    }
    let text = toml::to_string(&file).map_err(|error| {
        Refusal::new(RefusalCode::Invalid, format_args!("this is no guest's file: {error}"))
    })?;
    let config = GuestConfig::parse(&text, Path::new("guest.toml")).and_then(|config| {
        config.check_files()?;
        Ok(config)
    });
    let config = config.map_err(|error| match error {
        ConfigError::Invalid(problems) => {
            let field = problems.first().and_then(|problem| problem.key().map(str::to_owned));
            let messages: Vec<_> = problems.into_iter().map(|problem| problem.message).collect();
            Refusal { field, ..Refusal::new(RefusalCode::Invalid, messages.join("\n")) }
        }
        ConfigError::MissingFiles(ref missing) => {
            let field = missing.first().map(|missing| missing.key.clone());
            Refusal { field, ..Refusal::new(RefusalCode::Invalid, error) }
        }
        error => Refusal::new(RefusalCode::Invalid, error),
    })?;
    let disks = config.disks.iter().enumerate().map(|(i, disk)| (format!("disks[{i}].path"), &disk.path));
    let boot = [("boot.kernel", Some(&config.boot.kernel)), ("boot.initrd", config.boot.initrd.as_ref())];
    let boot = boot.into_iter().filter_map(|(key, path)| Some((key.to_owned(), path?)));
    if let Some((key, _)) = boot.chain(disks).find(|(_, path): &(String, &PathBuf)| !path.is_absolute()) {
        let message = format!(
            "`{key}` is a relative path, and the daemon has no directory for it; write an absolute one"
        );
        return Err(Refusal::invalid(key, message));
    }
    Ok((text, config))
}

/// Why a guest ended instead of running, by what its process said.
fn why_ended(name: &str, exit: Option<i32>, said: File) -> Refusal {
    let log = part_of(said, None, true).map(|(log, _)| log).unwrap_or_default();
    let said = log.find("error: ").map(|at| log[at + "error: ".len()..].trim_end().to_owned());
    let code = match exit.and_then(|exit| u8::try_from(exit).ok()) {
        Some(EXIT_USAGE) => RefusalCode::Invalid,
        Some(EXIT_BLOCKED) => RefusalCode::Blocked,
        _ => RefusalCode::Failed,
    };
    let ended = || match exit {
        Some(0) => format!("the guest {name} ended as soon as it had started; see `vm-service logs {name}`"),
        Some(status) => format!("the process of the guest {name} ended with status {status}"),
        None => format!("a signal ended the process of the guest {name}"),
    };
    Refusal::new(code, said.unwrap_or_else(ended))
}

/// Creates a file that only its owner reads.
fn create(path: &Path) -> io::Result<File> {
    File::options().write(true).create_new(true).mode(0o600).open(path)
}

fn open_log(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)
}

/// Lines of a log, from an offset or the last ones, and the offset behind them. A line without an end is one only when the log
/// has ended.
fn part_of(mut file: File, from: Option<u64>, ended: bool) -> io::Result<(String, u64)> {
    let length = file.metadata()?.len();
    let left_out = length.saturating_sub(MAX_LOG);
    let offset = from.unwrap_or(left_out);
    if offset > length {
        // File systems refuse to seek to the highest offsets.
        return Ok((String::new(), offset));
    }
    file.seek(SeekFrom::Start(offset))?;
    let mut bytes = Vec::new();
    let is_full = file.take(MAX_LOG).read_to_end(&mut bytes)? as u64 == MAX_LOG;
    if !ended || is_full {
        let end = bytes.iter().rposition(|&byte| byte == b'\n').map(|at| at + 1);
        bytes.truncate(end.unwrap_or(if is_full { bytes.len() } else { 0 }));
    }
    let begin = match from {
        None if left_out > 0 => bytes.iter().position(|&byte| byte == b'\n').map_or(0, |at| at + 1),
        _ => 0,
    };
    let next = offset.saturating_add(bytes.len() as u64);
    Ok((String::from_utf8_lossy(&bytes[begin..]).into_owned(), next))
}

/// The memory of a guest's processes, in bytes: of its keeper and of what that started, the VMM among it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Memory {
    /// What is resident.
    pub(super) resident: u64,
    /// What Linux keeps there for devices: VFIO counts it as locked (type 1) or as pinned (iommufd).
    pub(super) pinned: u64,
}

/// The memory of a guest's processes.
pub(super) fn memory_of(host: &Host, keeper: u32) -> Option<Memory> {
    let children = children(host, keeper).into_iter().filter_map(|child| memory(host, child));
    Some(children.fold(memory(host, keeper)?, |sum, child| Memory {
        resident: sum.resident.saturating_add(child.resident),
        pinned: sum.pinned.saturating_add(child.pinned),
    }))
}

/// The children of a process: as Linux lists them, or, where it does not (`CONFIG_PROC_CHILDREN`), all processes whose parent it is.
fn children(host: &Host, parent: u32) -> Vec<u32> {
    let tasks = files(&host.proc.join(parent.to_string()).join("task"));
    let lists: Vec<_> = tasks.filter_map(|task| fs::read_to_string(task.join("children")).ok()).collect();
    if !lists.is_empty() {
        return lists
            .iter()
            .flat_map(|list| list.split_whitespace())
            .filter_map(|pid| pid.parse().ok())
            .collect();
    }
    let is_child = |pid: &u32| {
        let stat = fs::read_to_string(host.proc.join(pid.to_string()).join("stat")).unwrap_or_default();
        // The name before may have anything in it (proc_pid_stat(5)).
        let after = stat.rsplit_once(") ").map(|(_, after)| after.split(' ').nth(1));
        after.flatten().is_some_and(|own| own.parse() == Ok(parent))
    };
    let processes = files(&host.proc).filter_map(|path| path.file_name()?.to_str()?.parse().ok());
    processes.filter(is_child).collect()
}

fn files(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(folder).into_iter().flatten().filter_map(|file| Some(file.ok()?.path()))
}

fn memory(host: &Host, process: u32) -> Option<Memory> {
    let status = fs::read_to_string(host.proc.join(process.to_string()).join("status")).ok()?;
    let bytes = |field: &str| -> Option<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(field))?;
        line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    let pinned = bytes("VmLck:").unwrap_or(0).saturating_add(bytes("VmPin:").unwrap_or(0));
    Some(Memory { resident: bytes("VmRSS:")?, pinned })
}

#[cfg(test)]
mod tests {
    use vm_passthrough::sim::SimHost;

    use super::*;

    #[test]
    fn the_memory_of_a_guest_is_that_of_its_keeper_and_of_its_children() {
        let sim = SimHost::new().expect("a host");
        let write = |path: &str, text: &str| sim.write(&format!("proc/{path}"), text).expect("written");
        write("7/status", "VmLck:\t       0 kB\nVmPin:\t       0 kB\nVmRSS:\t     100 kB\n");
        write("7/stat", "7 (vm-service) S 1 7");
        write("8/status", "VmLck:\t    4096 kB\nVmPin:\t     256 kB\nVmRSS:\t    8192 kB\n");
        write("8/stat", "8 (a) b) S 7 7");
        write("9/status", "VmPin:\t    1 kB\nVmRSS:\t    1 kB\n");
        write("9/stat", "9 (other) S 8 7");
        let host = sim.plain_host();
        let check = || {
            let memory = memory_of(&host, 7).expect("it is known");
            assert_eq!((memory.resident, memory.pinned), (8292 << 10, 4352 << 10));
        };
        fs::create_dir_all(sim.path("proc/7/task/7")).expect("made");
        check();
        // Where Linux lists children, nothing else is read.
        write("7/task/7/children", "8 ");
        write("8/stat", "");
        check();
        assert!(memory_of(&host, 10).is_none());
    }
}
