"""The closed vocabulary of the exercises: every word they use, by purpose. The lists of one purpose never repeat."""

from __future__ import annotations


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES: tuple[str, ...] = _listed(
    """
    amber ancient bitter blue bold brave bright broken calm clever cold crimson curly damp dark deep dusty eager
    empty faint fancy fast fierce frozen gentle giant golden grand green happy heavy hidden hollow humble jolly kind
    lazy little lonely loud lucky mellow mighty modern narrow noble odd pale plain proud purple quiet rapid red
    rough royal rusty shiny silent simple smooth sturdy wild young
    """
)
"""First words of the keys of recall and needle items."""

NOUNS: tuple[str, ...] = _listed(
    """
    alpaca antelope anvil axe baboon badger barrel basket bat bear beaver bee beetle bench bison blanket boa boar
    bottle bowl broom brush bucket buffalo button calf camel candle caribou carp carpet catfish chair cheetah cobra
    cod comb cow coyote crab cradle crane cricket crocodile crow cup curtain deer desk dingo dolphin donkey dove
    drawer drill duck eagle eel elephant elk emu falcon ferret finch flamingo fork fox frog gecko gerbil giraffe
    goat goose gorilla gull hammer hamster hare hawk hedgehog hen heron herring hippo horse iguana jaguar jar
    kangaroo kettle kitten knife koala ladder lamb lamp lantern lark lemur leopard lion lizard llama lobster lynx
    magpie mink mirror mole monkey moose moth mouse mule needle newt octopus ostrich otter oven owl pan panda
    panther parrot peacock pelican penguin perch pig pigeon pike pillow plate poodle possum puma puppy python quail
    rabbit rake rat raven ray rhino robin rooster salmon sardine saw scorpion seal shark sheep shelf shovel shrew
    shrimp sloth slug snail snake sparrow spider spoon squid squirrel stoat stork swallow swan table teapot thread
    thrush tiger toad tortoise toucan towel trout tuna turkey turtle viper vole wagon walrus wasp weasel whale wolf
    wombat woodpecker worm wren wrench zebra zipper
    """
)
"""Second words of the keys."""

SORTABLE_WORDS: tuple[str, ...] = _listed(
    """
    acorn almond apple bacon banana bean berry bread butter cabbage cake carrot celery cheese cherry coffee cookie
    corn cream date egg fig flour garlic ginger grape ham honey jam juice kale leek lemon lentil lime mango melon
    milk mint nut oat olive onion papaya pasta peach pear pepper pickle plum potato radish raisin rice salad salt
    soup spice sugar syrup tea toast tomato yogurt
    """
)
"""What the sorting exercises sort, in alphabetical order."""

VALUES: tuple[str, ...] = SORTABLE_WORDS + _listed(
    """
    river lake ocean sea bay island beach cliff valley hill mountain canyon desert forest jungle meadow swamp pond
    stream glacier volcano cave dune reef lagoon delta prairie tundra plateau ridge peak crater geyser rain snow
    hail storm thunder lightning fog mist frost dew wind breeze cloud rainbow sunrise sunset dawn dusk shadow flame
    ember smoke steam spark comet planet moon star galaxy orbit eclipse meteor oak pine maple birch willow cedar elm
    fir spruce palm bamboo ivy fern moss grass clover rose tulip daisy lily orchid violet poppy lotus thistle nettle
    cactus mushroom root branch leaf petal seed bark thorn gold silver copper iron steel bronze tin zinc marble
    granite slate chalk clay sand gravel pebble stone crystal ruby pearl diamond topaz jade opal quartz garnet
    emerald glass paper leather velvet silk wool cotton linen wax drum flute violin piano guitar trumpet harp cello
    banjo organ bell whistle song melody rhythm chorus echo castle tower bridge palace temple cottage cabin barn
    stable windmill lighthouse fountain statue arch column dome gate wall window door chimney attic cellar balcony
    tunnel canal boat ship raft canoe anchor sail rudder mast paddle compass train engine rocket balloon glider
    bicycle scooter sled ski skate wheelbarrow ferry tram hat scarf glove boot shoe sock shirt jacket vest belt
    crown ring necklace bracelet ribbon purse wallet mask pencil crayon eraser ruler notebook journal diary poem
    novel story legend riddle puzzle chess domino dice football tennis hockey rugby golf archery judo karate ballet
    opera carnival parade festival picnic cube sphere cone spiral pyramid arrow magnet battery laser radar camera
    lens prism telescope robot antenna radio signal pixel cable switch lever pulley dragon unicorn phoenix wizard
    knight pirate queen prince duke viking ninja clown mermaid fairy ghost idea dream memory secret promise wish
    luck joy hope peace truth honor glory atom bone heart thumb elbow knee ankle bakery factory quarry orchard
    vineyard pasture stadium theater gallery cinema hotel tavern quilt hammock tent lasso kite puppet doll medal
    flag torch helmet shield sword avalanche blizzard tornado
    """
)
"""Values of the keys, and the words of other exercises; the sortable ones are the first of them."""

NAMES: tuple[str, ...] = _listed(
    "Ana Ben Carla David Emma Felix Greta Hugo Ida Jonas Karin Leo Mia Nora Oscar Paula Rosa Simon Tom Uma Vera"
    " Walter Yara Zoe"
)
COLORS: tuple[str, ...] = _listed("beige black brown gray indigo maroon orange pink teal turquoise white yellow")
SKIES: tuple[str, ...] = _listed("sunny cloudy rainy snowy windy foggy stormy clear")

PEOPLE: tuple[str, ...] = _listed(
    "baker farmer teacher doctor sailor painter singer writer driver pilot nurse judge clerk guard tailor miner"
    " hunter shepherd butcher plumber dentist lawyer soldier student"
)
PLACES: tuple[str, ...] = _listed(
    "market station garden school church library hospital harbor village office shop museum"
)
THINGS: tuple[str, ...] = _listed("box cart fence roof wheel letter book coat rope clock ticket map")
MOVES: tuple[str, ...] = _listed("walks runs goes drives rides hurries returns wanders")
DEEDS: tuple[str, ...] = _listed("cleans paints repairs carries sells buys finds opens")
MANNERS: tuple[str, ...] = _listed("slowly quickly quietly often again early late alone")
TIMES: tuple[str, ...] = _listed("morning evening night afternoon weekend winter summer autumn")
