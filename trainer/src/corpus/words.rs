//! Words of both languages. The n-th word of a list means the same in both, so that stories share one world.

/// English or 正體中文.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Lang {
    En,
    Zh,
}

/// A list in both languages.
type Words = [(&'static str, &'static str)];

pub(super) const PEOPLE: &Words = &[
    ("Mia", "小美"),
    ("Tom", "阿明"),
    ("Anna", "小安"),
    ("Ben", "阿本"),
    ("Lily", "莉莉"),
    ("Sam", "小山"),
    ("Ella", "艾拉"),
    ("Max", "大偉"),
    ("Nora", "小諾"),
    ("Leo", "阿力"),
    ("Zoe", "佐依"),
    ("Finn", "阿芬"),
    ("Ruby", "小紅"),
    ("Hugo", "雨果"),
    ("Ivy", "小薇"),
    ("Owen", "歐文"),
];

pub(super) const COLOURS: &Words = &[
    ("red", "紅色"),
    ("blue", "藍色"),
    ("green", "綠色"),
    ("yellow", "黃色"),
    ("white", "白色"),
    ("black", "黑色"),
    ("pink", "粉紅色"),
    ("brown", "棕色"),
    ("orange", "橘色"),
    ("purple", "紫色"),
];

/// English noun; Chinese measure word and noun.
pub(super) const THINGS: &[(&str, &str, &str)] = &[
    ("ball", "顆", "球"),
    ("kite", "隻", "風箏"),
    ("book", "本", "書"),
    ("hat", "頂", "帽子"),
    ("boat", "艘", "小船"),
    ("cup", "個", "杯子"),
    ("lamp", "盞", "燈"),
    ("drum", "面", "鼓"),
    ("box", "個", "盒子"),
    ("bell", "個", "鈴鐺"),
    ("doll", "個", "娃娃"),
    ("stone", "塊", "石頭"),
];

pub(super) const PLACES: &Words = &[
    ("park", "公園"),
    ("market", "市場"),
    ("beach", "海邊"),
    ("school", "學校"),
    ("library", "圖書館"),
    ("farm", "農場"),
    ("garden", "花園"),
    ("river", "河邊"),
    ("hill", "山丘"),
    ("barn", "穀倉"),
];

pub(super) const TIMES: &Words = &[
    ("Once upon a time", "從前"),
    ("One sunny morning", "一個晴朗的早上"),
    ("One windy afternoon", "一個颳風的下午"),
    ("One quiet evening", "一個安靜的傍晚"),
    ("On the first day of spring", "春天的第一天"),
    ("After a long rain", "下了一場大雨以後"),
    ("On a cold Sunday", "一個寒冷的星期天"),
];

/// What is counted, always more than one of it; Chinese with its measure word, the same for all.
pub(super) const COUNTED: &Words = &[
    ("shells", "個貝殼"),
    ("apples", "個蘋果"),
    ("oranges", "個橘子"),
    ("bells", "個鈴鐺"),
    ("cups", "個杯子"),
    ("eggs", "個雞蛋"),
];

pub(super) const NUMBERS: &Words = &[
    ("zero", "零"),
    ("one", "一"),
    ("two", "二"),
    ("three", "三"),
    ("four", "四"),
    ("five", "五"),
    ("six", "六"),
    ("seven", "七"),
    ("eight", "八"),
    ("nine", "九"),
    ("ten", "十"),
    ("eleven", "十一"),
    ("twelve", "十二"),
    ("thirteen", "十三"),
    ("fourteen", "十四"),
    ("fifteen", "十五"),
    ("sixteen", "十六"),
    ("seventeen", "十七"),
    ("eighteen", "十八"),
    ("nineteen", "十九"),
    ("twenty", "二十"),
];

/// Animal and what it says.
pub(super) const ANIMALS: &[(&str, &str)] = &[
    ("bee", "buzz"),
    ("cat", "meow"),
    ("cow", "moo"),
    ("dog", "woof"),
    ("duck", "quack"),
    ("frog", "ribbit"),
    ("horse", "neigh"),
    ("lion", "roar"),
    ("owl", "hoo"),
    ("sheep", "baa"),
];

pub(super) const CAPITALS: &[(&str, &str)] = &[
    ("Austria", "Vienna"),
    ("Australia", "Canberra"),
    ("Belgium", "Brussels"),
    ("Brazil", "Brasilia"),
    ("Canada", "Ottawa"),
    ("China", "Beijing"),
    ("Cuba", "Havana"),
    ("Denmark", "Copenhagen"),
    ("Egypt", "Cairo"),
    ("England", "London"),
    ("Finland", "Helsinki"),
    ("France", "Paris"),
    ("Germany", "Berlin"),
    ("Greece", "Athens"),
    ("Hungary", "Budapest"),
    ("India", "New Delhi"),
    ("Ireland", "Dublin"),
    ("Italy", "Rome"),
    ("Japan", "Tokyo"),
    ("Kenya", "Nairobi"),
    ("Mexico", "Mexico City"),
    ("Norway", "Oslo"),
    ("Peru", "Lima"),
    ("Poland", "Warsaw"),
    ("Portugal", "Lisbon"),
    ("Russia", "Moscow"),
    ("Spain", "Madrid"),
    ("Sweden", "Stockholm"),
    ("Switzerland", "Bern"),
    ("Taiwan", "Taipei"),
    ("Thailand", "Bangkok"),
    ("Turkey", "Ankara"),
    ("the USA", "Washington"),
];

pub(super) const OPPOSITES: &[(&str, &str)] = &[
    ("big", "small"),
    ("day", "night"),
    ("early", "late"),
    ("fast", "slow"),
    ("full", "empty"),
    ("happy", "sad"),
    ("hard", "soft"),
    ("hot", "cold"),
    ("light", "dark"),
    ("loud", "quiet"),
    ("old", "new"),
    ("open", "closed"),
    ("up", "down"),
    ("wet", "dry"),
];

/// English thing, Chinese thing, index of its colour.
pub(super) const COLOUR_OF: &[(&str, &str, usize)] = &[
    ("apple", "蘋果", 0),
    ("banana", "香蕉", 3),
    ("carrot", "胡蘿蔔", 8),
    ("chocolate", "巧克力", 7),
    ("coal", "煤炭", 5),
    ("grass", "草地", 2),
    ("leaf", "葉子", 2),
    ("lemon", "檸檬", 3),
    ("rose", "玫瑰", 0),
    ("sea", "大海", 1),
    ("sky", "天空", 1),
    ("snow", "雪", 4),
];

pub(super) const DAYS: &[&str] =
    &["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

pub(super) const MONTHS: &[&str] = &[
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Word `i` of a list.
pub(super) fn word(list: &Words, lang: Lang, i: usize) -> &'static str {
    match lang {
        Lang::En => list[i].0,
        Lang::Zh => list[i].1,
    }
}

/// A colour and a thing: `a red ball`, `一顆紅色的球`.
pub(super) fn a_thing(lang: Lang, (colour, thing): (usize, usize)) -> String {
    let (en, measure, zh) = THINGS[thing];
    match lang {
        Lang::En => {
            let colour = COLOURS[colour].0;
            let article = if colour.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
            format!("{article} {colour} {en}")
        }
        Lang::Zh => format!("一{measure}{}的{zh}", COLOURS[colour].1),
    }
}

/// `the red ball`, `那顆紅色的球`.
pub(super) fn the_thing(lang: Lang, (colour, thing): (usize, usize)) -> String {
    let (en, measure, zh) = THINGS[thing];
    match lang {
        Lang::En => format!("the {} {en}", COLOURS[colour].0),
        Lang::Zh => format!("那{measure}{}的{zh}", COLOURS[colour].1),
    }
}
