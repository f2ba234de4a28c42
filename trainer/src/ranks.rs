//! Where this process stands among the ranks of a run, as whoever started them says: torchrun's variables,
//! Open MPI's, or Slurm's. There is no launcher or protocol of our own.
use q4_core::{Code, Error, Result};
use std::fmt;

#[cfg(test)]
mod tests;

/// A rank's place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// From 0.
    pub rank: usize,
    /// Ranks of the run, two or more.
    pub size: usize,
    /// From 0, among those of this machine; which GPU is its own.
    pub local: usize,
    /// Ranks on this machine.
    pub local_size: usize,
    /// Where they meet.
    pub meet: Meet,
    /// Who started them.
    pub by: Starter,
    /// Times torchrun has started them again.
    pub restarts: u32,
}

/// Where ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meet {
    /// Name or address of a machine.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// Whoever started the ranks listens there already, else rank 0 will.
    pub served: bool,
    /// Begins every key, so that a second try does not read what the first one wrote.
    pub prefix: String,
}

/// Who starts ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Starter {
    /// `torchrun`, or whoever sets the same variables.
    Torchrun,
    /// `mpirun` of Open MPI.
    Mpirun,
    /// `srun`.
    Slurm,
}

impl fmt::Display for Starter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Torchrun => "torchrun's variables",
            Self::Mpirun => "mpirun",
            Self::Slurm => "Slurm",
        })
    }
}

/// The names under which a starter says the same.
struct Names {
    by: Starter,
    rank: &'static str,
    /// The first that is set counts.
    size: &'static [&'static str],
    local: &'static str,
    local_size: &'static [&'static str],
}

const TORCHRUN: Names = Names {
    by: Starter::Torchrun,
    rank: "RANK",
    size: &["WORLD_SIZE"],
    local: "LOCAL_RANK",
    local_size: &["LOCAL_WORLD_SIZE"],
};
const MPIRUN: Names = Names {
    by: Starter::Mpirun,
    rank: "OMPI_COMM_WORLD_RANK",
    size: &["OMPI_COMM_WORLD_SIZE"],
    local: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
};
/// A job's own script has some of them, too: as a rank it would wait for tasks that only srun starts.
const SLURM: Names = Names {
    by: Starter::Slurm,
    rank: "SLURM_PROCID",
    size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
    local: "SLURM_LOCALID",
    local_size: &["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"],
};

/// Where torch's own programs listen.
const PORT: u16 = 29500;

/// A variable's value; empty counts as not set.
type Get<'a> = &'a dyn Fn(&str) -> Option<String>;

impl Place {
    /// What the environment says; `None`: one process alone.
    ///
    /// # Errors
    /// [`Code::Usage`] naming variables that are missing, no numbers, or contradict each other.
    pub fn of_environment() -> Result<Option<Self>> {
        Self::read(&|name| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned()))
    }

    /// As [`of_environment`](Self::of_environment), of the variables that `get` knows.
    pub fn read(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let get: Get<'_> = &|name| get(name).filter(|v| !v.trim().is_empty());
        let torch = Seat::read(&TORCHRUN, get)?;
        // Whoever starts one torchrun a machine, by srun or mpirun, means its ranks.
        if get("TORCHELASTIC_RUN_ID").is_some() {
            return torch.map(|seat| seat.place(get)).transpose().map(Option::flatten);
        }
        // mpirun inside of an allocation starts by srun what starts the ranks.
        let other = match Seat::read(&MPIRUN, get)? {
            Some(seat) => Some(seat),
            None => Seat::read(&SLURM, get)?,
        };
        if let (Some(a), Some(b)) = (&torch, &other)
            && (a.rank, a.size) != (b.rank, b.size)
        {
            let said = |s: &Seat| format!("{}={}, {}={}", s.names.rank, s.rank, s.names.size[0], s.size);
            return Err(Error::new(Code::Usage, "the environment names two places among ranks")
                .need("one")
                .have(format!("{}; {}", said(a), said(b)))
                .fix(format!("env -u {} -u {} q4 train ...", a.names.rank, a.names.size[0])));
        }
        match torch.or(other) {
            Some(seat) => seat.place(get),
            None => Ok(None),
        }
    }

    /// Whether this rank speaks and writes for all.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, size, meet, by, .. } = self;
        write!(f, "rank {rank} of {size}, started by {by}, meeting at {}:{}", meet.host, meet.port)
    }
}

/// The numbers alone.
struct Seat {
    names: &'static Names,
    rank: usize,
    size: usize,
    local: Option<usize>,
    local_size: Option<usize>,
}

impl Seat {
    fn read(names: &'static Names, get: Get<'_>) -> Result<Option<Self>> {
        let first = |list: &'static [&'static str]| list.iter().find(|n| get(n).is_some()).copied();
        let size_name = first(names.size);
        let all = [names.rank, size_name.unwrap_or(names.size[0]), names.local];
        let (set, missing): (Vec<_>, Vec<_>) = all.iter().partition(|n| get(n).is_some());
        // A local rank is needed where devices are chosen, and a job's script has a size without a rank.
        let slurm = names.by == Starter::Slurm;
        if set.is_empty() || slurm && get(names.rank).is_none() {
            return Ok(None);
        }
        if get(names.rank).is_none() || size_name.is_none() {
            return Err(Error::new(Code::Usage, format!("ranks: {} is missing", list(&missing)))
                .need(format!("{} and {} of every rank", names.rank, names.size[0]))
                .have(format!("{} alone", list(&set)))
                .fix(format!("set it, or for one process alone: env -u {} q4 train ...", set[0])));
        }
        let number = |name: &str| -> Result<usize> {
            let text = get(name).unwrap_or_default();
            text.trim()
                .parse()
                .map_err(|_| Error::new(Code::Usage, format!("ranks: {name}={text}")).need("a number from 0"))
        };
        let (rank, size) = (number(names.rank)?, number(size_name.unwrap_or_default())?);
        let local = get(names.local).map(|_| number(names.local)).transpose()?;
        let local_size = match first(names.local_size) {
            // Slurm writes `2(x3),1`: two tasks on each of three machines, one on a fourth.
            Some(name) if slurm => {
                let text = get(name).unwrap_or_default();
                let same = !text.contains(',');
                text.split('(').next().and_then(|n| n.trim().parse().ok()).filter(|_| same)
            }
            name => name.map(number).transpose()?,
        };
        let within = |what: &str, n: usize, of: &str, size: usize| match n < size {
            true => Ok(()),
            false => Err(Error::new(Code::Usage, format!("ranks: {what}={n} and {of}={size}"))
                .need(format!("{what} below {of}"))),
        };
        within(names.rank, rank, size_name.unwrap_or_default(), size)?;
        if let (Some(local), Some(local_size)) = (local, local_size) {
            within(names.local, local, names.local_size[0], local_size)?;
        }
        Ok(Some(Self { names, rank, size, local, local_size }))
    }

    fn place(self, get: Get<'_>) -> Result<Option<Place>> {
        let Self { names, rank, size, local, local_size } = self;
        if size == 1 {
            return Ok(None);
        }
        let local_size = local_size.unwrap_or(if local.is_some() { 1 } else { size });
        let local = local.unwrap_or(rank % local_size.max(1));
        let served = get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v.eq_ignore_ascii_case("true"));
        let tries = get("TORCHELASTIC_RESTART_COUNT").unwrap_or_else(|| "0".into());
        let host = match get("MASTER_ADDR").or_else(|| host(&self, size, local_size, get)) {
            Some(host) => host,
            None => return Err(missing(&self, "MASTER_ADDR")),
        };
        let port = match (get("MASTER_PORT"), names.by) {
            (Some(text), _) => text.trim().parse().ok().filter(|p| *p != 0).ok_or_else(|| {
                Error::new(Code::Usage, format!("ranks: MASTER_PORT={text}")).need("a port, 1 to 65535")
            })?,
            (None, Starter::Torchrun) => return Err(missing(&self, "MASTER_PORT")),
            (None, _) => port(get),
        };
        let restarts = tries.trim().parse().unwrap_or(0);
        let meet = Meet { host, port, served, prefix: format!("q4-train/{tries}") };
        Ok(Some(Place { rank, size, local, local_size, meet, by: names.by, restarts }))
    }
}

fn missing(seat: &Seat, name: &str) -> Error {
    Error::new(Code::Usage, format!("ranks: {name} is missing"))
        .need("MASTER_ADDR and MASTER_PORT: where rank 0 listens, the same for all")
        .have(format!("{}={}, {}={}", seat.names.rank, seat.rank, seat.names.size[0], seat.size))
        .fix(match seat.names.by {
            Starter::Torchrun => "torchrun sets both; by hand: MASTER_ADDR=127.0.0.1 MASTER_PORT=29500",
            Starter::Mpirun => "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ...",
            Starter::Slurm => "MASTER_ADDR=HOST MASTER_PORT=29500 srun ...",
        })
}

/// The machine of rank 0, where the starter tells it.
fn host(seat: &Seat, size: usize, local_size: usize, get: Get<'_>) -> Option<String> {
    match seat.names.by {
        Starter::Torchrun => None,
        Starter::Mpirun => (local_size == size).then(|| "127.0.0.1".into()),
        Starter::Slurm => {
            let nodes = get("SLURM_STEP_NODELIST").or_else(|| get("SLURM_JOB_NODELIST"));
            let alone = || (local_size == size).then(|| "127.0.0.1".to_owned());
            nodes.and_then(|list| first_node(&list)).or_else(alone)
        }
    }
}

/// The first machine of a list as Slurm writes it: `a1`, `a1,b2`, `gpu[03-07,11]-x`.
fn first_node(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (head, rest) = list.split_at(end);
    let Some(inner) = rest.strip_prefix('[') else {
        return (!head.is_empty()).then(|| head.to_owned());
    };
    let (numbers, tail) = inner.split_once(']')?;
    let number = numbers.split(['-', ',']).next()?;
    Some(format!("{head}{number}{}", tail.split(',').next()?))
}

/// A port that differs from job to job on one machine.
fn port(get: Get<'_>) -> u16 {
    let job = ["SLURM_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"].iter().find_map(|n| get(n));
    // FNV-1a: all ranks must come to the same number.
    let hash = |text: String| {
        text.bytes().fold(0x811c_9dc5_u32, |h, b| (h ^ u32::from(b)).wrapping_mul(0x0100_0193))
    };
    PORT + job.map_or(0, |job| (hash(job) % 3000) as u16)
}

fn list(names: &[&str]) -> String {
    names.join(", ")
}
