"""Words for keys and names for phone books, in no particular order.

A recall test needs many different strings made of common words; which words is
of no importance. No word occurs twice in a list.
"""

ADJECTIVES = tuple(
  """
  able airy amber ample ancient angry arid aware awake azure bald basic bitter
  black blank bland blind blue blunt bold brave brief bright brisk broad brown
  bumpy busy calm careful cheap cheerful chilly civil clean clear clever cloudy
  coarse cold common complex cool crisp crooked curious curly damp dark dear
  deep dense distant double dry dull dusty eager early earnest easy elder empty
  equal even exact faint fair famous fancy fast feeble fertile fierce fine firm
  flat fleet fond formal frail frank free fresh full funny gentle giant glad
  golden good grand grateful gray great green grim handy happy hard harsh hasty
  heavy hidden high hollow honest huge humble hungry icy idle inner jolly keen
  kind large late lazy lean light little lively local lonely long loose loud
  lovely loyal lucky mellow merry mild minor misty modest muddy narrow neat new
  nimble noble noisy normal odd old open orange outer pale patient plain
  pleasant polite poor proud pure purple quick quiet rapid rare ready red rich
  ripe robust rough round royal rusty sacred sad safe salty sandy scarce secret
  serious sharp short shy silent silver simple sleepy slim slow small smooth
  snowy sober soft solid sour spare steady steep still stormy strange strict
  strong sturdy subtle sudden sunny sweet swift tall tame tender thick thin
  tidy tiny tired tough tranquil true upper urban useful usual vague vast
  violet vital vivid warm wary weary wet white whole wide wild windy wise witty
  wooden yellow young
  """.split()
)

NOUNS = tuple(
  """
  acorn actor alley almond anchor ankle anthem anvil apple apron arch arrow ash
  attic autumn avenue axle badge baker ballad bamboo banjo banner barley barn
  barrel basin basket beach bead beam bean bear beaver bell bench berry bishop
  blanket blossom boat bonnet book boot bottle boulder branch brass bread brick
  bridge brook broom brush bucket buckle bugle bundle butter button cabin cable
  camel camera canal candle canoe canyon captain caravan carpet cart castle
  cave cedar cellar chain chair chalk chapel cherry chest chimney circle
  citadel clock cloud clover coach coal coast cobalt comet compass copper coral
  corner cottage cotton cradle crane crater creek cricket crown crystal curtain
  cushion cypress daisy dancer desk diamond dinner dolphin donkey door dragon
  drawer dream drum duck eagle earth easel echo elbow elm ember engine fabric
  falcon farmer feather fence fern ferry fiddle field finch flag flame flask
  flint flood floor flower flute forest fork fountain fox frost garden garlic
  gate giraffe glacier glass glove goat goose grain granite grape grass gravel
  grove guitar hammer hammock harbor harp harvest hat hawk hazel heart hedge
  helmet herb heron hill hinge honey hook horizon horn horse house island ivory
  ivy jacket jar jasmine jewel judge jungle kettle key kitchen kite knight
  ladder lagoon lake lamp lantern lark laurel leaf leather lemon lily linen
  lion lizard lock lotus magnet maple marble market marsh mask meadow melon
  mill mirror mitten monk moon morning moss mountain mouse museum napkin needle
  nest net nickel north nutmeg oak oar oasis ocean olive onion orchard orchid
  otter oven owl oyster paddle page palace palm panther paper parrot path peach
  pearl pebble pencil pepper piano pigeon pillar pilot pine pirate planet plum
  pocket poem pond poplar porch prairie prince prism pulley pumpkin quarry
  queen quill rabbit raft rain raven reed ribbon ridge ring river road robin
  rocket roof rope rose ruby rudder saddle sail salmon sand saucer school sea
  shadow sheep shell shepherd shield ship shore shovel sister sketch sky sleigh
  sleet smoke snow soap sparrow spear spice spider spire spoon spring spruce
  squirrel stable star statue steam stone stool storm stove straw stream street
  sugar summer sunset swan table tailor teacher temple thistle thunder ticket
  tiger timber torch tower trail train tree trumpet tulip tunnel turtle
  umbrella valley vase velvet village vine violin wagon walnut water wave whale
  wheat wheel willow window winter wolf wood wool wren yard zebra
  """.split()
)

FIRST_NAMES = tuple(
  """
  Adam Agnes Alan Alice Amy Andrew Ann Anthony Arthur Barbara Beatrice Benjamin
  Bernard Betty Brian Carl Caroline Catherine Cecil Charles Charlotte Clara
  Clive Daniel David Deborah Dennis Diana Donald Dora Dorothy Edgar Edith
  Edmund Edward Eleanor Elizabeth Ellen Emily Emma Eric Ernest Esther Ethel
  Eugene Evelyn Fanny Felix Flora Frances Frank Frederick Gabriel George Gerald
  Gilbert Grace Graham Hannah Harold Harriet Harry Hazel Helen Henry Hilda
  Horace Hugh Irene Isaac Isabel Jack Jacob James Jane Janet Jean Jessica Joan
  John Jonathan Joseph Joyce Judith Julia Karen Keith Kenneth Laura Lawrence
  Leo Leonard Lewis Lillian Linda Louis Louisa Lucy Mabel Margaret Maria Marion
  Mark Martha Martin Mary Matilda Maurice Michael Mildred Miriam Nancy Nathan
  Nicholas Nora Norman Oliver Olivia Oscar Pamela Patrick Paul Peter Philip
  Phoebe Rachel Ralph Raymond Rebecca Richard Robert Roger Ronald Rose Ruth
  Samuel Sarah Simon Sophia Stanley Stella Stephen Susan Sylvia Theodore Thomas
  Timothy Ursula Vera Victor Vincent Violet Walter Wanda William Winifred
  """.split()
)

LAST_NAMES = tuple(
  """
  Abbott Adams Allen Andrews Archer Armstrong Arnold Ashby Atkins Austin Bailey
  Baker Baldwin Ball Banks Barker Barnes Barrett Barton Bates Baxter Beck Bell
  Bennett Benson Berry Bird Bishop Blake Bond Booth Bowen Boyd Bradley Brady
  Briggs Brooks Brown Bryant Buckley Burgess Burke Burns Burton Bush Butler
  Byrne Cain Caldwell Cameron Campbell Carey Carlson Carpenter Carr Carroll
  Carter Chambers Chandler Chapman Clark Clarke Clayton Cohen Cole Coleman
  Collins Conway Cook Cooper Cox Craig Crawford Cross Curtis Dalton Daly
  Daniels Davidson Davies Davis Dawson Day Dean Dixon Doyle Drake Duncan Dunn
  Dyer Eaton Edwards Elliott Ellis Emerson Evans Farmer Farrell Ferguson Field
  Finch Fisher Fleming Fletcher Flynn Forbes Ford Foster Fowler Fox Francis
  Franklin Fraser Freeman French Frost Fuller Gardner Garner Gates Gibson
  Gilmore Glover Goodwin Gordon Gould Graham Grant Graves Gray Green Greer
  Griffin Hale Hall Hamilton Hammond Hancock Hardy Harmon Harper Harrington
  Harris Harrison Hart Harvey Hayes Henderson Higgins Hill Hobbs Hodges Hoffman
  Holland Holmes Holt Hooper Hopkins Horton Houston Howard Howe Hudson Hughes
  Hunt Hunter Hurst Hutton Ingram Irwin Jackson James Jarvis Jennings Jensen
  Johnson Johnston Jones Jordan Joyce Keller Kelly Kemp Kennedy Kerr King Kirby
  Knight Lamb Lambert Lane Larson Lawson Lee Leonard Lewis Lindsay Little Lloyd
  Logan Long Lowe Lynch Mann Marsh Marshall Martin Mason Massey Matthews
  Maxwell May Mercer Meyer Miles Miller Mills Mitchell Monroe Moore Morgan
  Morris Morrison Morton Moss Murphy Murray Myers Nash Nelson Newman Newton
  Nichols Nolan Norris Norton Osborne Owen Page Palmer Parker Parsons Patterson
  Payne Pearson Perkins Perry Peters Phelps Phillips Pierce Porter Potter
  Powell Powers Pratt Preston Price Quinn Ramsey Randall Reed Reeves Reynolds
  Rhodes Rice Richards Riley Rivers Roberts Robinson Rogers Rose Ross Rowe
  Russell Ryan Sanders Saunders Sawyer Scott Sharp Shaw Shelton Shepherd
  Sherman Simmons Simpson Skinner Slater Sloan Small Smith Snow Snyder Spencer
  Stafford Stanley Steele Stephens Stevens Stewart Stokes Stone Stuart Sullivan
  Sutton Tate Taylor Terry Thomas Thompson Thornton Todd Townsend Tucker Turner
  Tyler Underwood Vance Vaughan Vincent Wade Walker Wallace Walsh Walters Ward
  Warner Warren Washington Waters Watkins Watson Watts Weaver Webb Weber
  Webster Welch Wells West Wheeler White Whitney Wilcox Wilkins Williams Willis
  Wilson Winters Wise Wolfe Wood Woodward Wright Wyatt Yates York Young
  """.split()
)
