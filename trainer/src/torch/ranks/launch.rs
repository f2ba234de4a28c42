//! `--gpus N`: N ranks on this machine and nothing more. They are told of each other by torchrun's variables,
//! and meet at a store that this process serves.
use super::gloo::Store;
use crate::stop;
use q4_core::{Code, Error, Result};
use std::ffi::OsString;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// Time the others have to end by themselves once a rank has failed.
const GRACE: Duration = Duration::from_secs(8);

/// Runs this program with `args` as `n` ranks; the status is the first rank's that is not zero and whose
/// process was not killed.
pub fn launch(n: usize, args: &[OsString]) -> Result<u8> {
    let program = std::env::current_exe().map_err(|e| Error::new(Code::Io, format!("--gpus: {e}")))?;
    let store = Store::open("127.0.0.1", 0, true, Duration::from_secs(60))?;
    let mut children: Vec<Child> = Vec::with_capacity(n);
    stop::hear_silently();
    stop::ask_first();
    for rank in 0..n {
        let mut command = Command::new(&program);
        command.args(args);
        let own = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", n), ("LOCAL_WORLD_SIZE", n)];
        command.envs(own.map(|(name, value)| (name, value.to_string())));
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", store.port().to_string());
        command.env("TORCHELASTIC_USE_AGENT_STORE", "True");
        match command.spawn() {
            Ok(child) => children.push(child),
            Err(e) => {
                // The others would wait for this one.
                children.iter_mut().for_each(|child| drop(child.kill().and_then(|()| child.wait())));
                return Err(Error::io(&program, &e));
            }
        }
    }
    let mut ended: Vec<Option<ExitStatus>> = vec![None; n];
    let mut told = false;
    let mut failed: Option<Instant> = None;
    while ended.iter().any(Option::is_none) {
        if let (Some(signal), false) = (stop::heard(), told) {
            told = true;
            children.iter().zip(&ended).filter(|(_, e)| e.is_none()).for_each(|(c, _)| pass_on(c, signal));
        }
        for (child, ended) in children.iter_mut().zip(&mut ended).filter(|(_, e)| e.is_none()) {
            *ended = child.try_wait().map_err(|e| Error::new(Code::Io, format!("--gpus: {e}")))?;
        }
        if failed.is_none() && ended.iter().flatten().any(|status| !status.success()) {
            failed = Some(Instant::now());
        }
        // Who has not met the others yet does not know that one of them is gone.
        if failed.is_some_and(|at| at.elapsed() > GRACE) {
            children.iter_mut().zip(&ended).filter(|(_, e)| e.is_none()).for_each(|(c, _)| drop(c.kill()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let codes: Vec<_> = ended.iter().flatten().map(ExitStatus::code).collect();
    let failed = codes.iter().flatten().find(|code| **code != 0);
    let killed = if codes.contains(&None) { Code::RankLost.exit() } else { 0 };
    Ok(failed.map_or(killed, |code| *code as u8))
}

#[cfg(unix)]
fn pass_on(child: &Child, signal: stop::Signal) {
    // SAFETY: a child that was not waited for still has its number.
    unsafe { libc::kill(child.id() as libc::pid_t, signal.number()) };
}

#[cfg(not(unix))]
fn pass_on(_: &Child, _: stop::Signal) {}
